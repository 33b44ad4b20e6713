// The threads of one rank: persistent workers that split a range. One thread means no workers.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace wherry {

class Team {
 public:
  explicit Team(int threads);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  // Runs fn(begin, end) on contiguous parts of [0, count), one a thread; returns when all are done.
  // fn must not throw.
  void split(std::int64_t count,
             const std::function<void(std::int64_t begin, std::int64_t end)>& fn);

 private:
  void work(int thread);
  void run_part(int thread) const;

  int threads_;
  std::int64_t count_ = 0;
  const std::function<void(std::int64_t, std::int64_t)>* fn_ = nullptr;
  std::atomic<std::uint32_t> round_{0};
  std::atomic<int> busy_{0};
  std::atomic<bool> stop_{false};
  std::vector<std::jthread> workers_;
};

}  // namespace wherry
