// Plain values from every rank, and a plain value from the ranks to the launcher.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <span>
#include <type_traits>
#include <vector>

#include "wherry/group.hpp"

namespace wherry::cli {

template <typename T>
concept Plain = std::is_trivially_copyable_v<T>;

// Collective: the value of every rank, indexed by rank.
template <Plain T>
std::vector<T> gather(const Group& group, const T& mine) {
  const auto all = group.allgather(std::as_bytes(std::span(&mine, 1)));
  std::vector<T> values(all.size());
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    std::memcpy(&values[rank], all[rank].data(), sizeof(T));
  }
  return values;
}

// Collective: of each sample, the largest of any rank. All ranks bring equally many.
inline std::vector<double> slowest(const Group& group, std::span<const double> mine) {
  std::vector<double> result(mine.size(), 0.0);
  for (const Group::Bytes& bytes : group.allgather(std::as_bytes(mine))) {
    std::vector<double> theirs(bytes.size() / sizeof(double));
    std::memcpy(theirs.data(), bytes.data(), bytes.size());
    for (std::size_t i = 0; i < result.size(); ++i) result[i] = std::max(result[i], theirs[i]);
  }
  return result;
}

// A T in memory that this process shares with the ranks it launches, as threads or processes:
// rank 0 leaves its result there, the launcher prints it.
template <Plain T>
class Shared {
 public:
  Shared()
      : memory_(
            mmap(nullptr, sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) {
    if (memory_ == MAP_FAILED) throw std::bad_alloc();
    new (memory_) T();
  }
  ~Shared() { munmap(memory_, sizeof(T)); }
  Shared(const Shared&) = delete;
  Shared& operator=(const Shared&) = delete;
  T& operator*() const { return *static_cast<T*>(memory_); }
  T* operator->() const { return static_cast<T*>(memory_); }

 private:
  void* memory_;
};

}  // namespace wherry::cli
