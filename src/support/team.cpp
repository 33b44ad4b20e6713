#include "support/team.hpp"

namespace wherry {

Team::Team(int threads) : threads_(threads) {
  for (int thread = 1; thread < threads; ++thread)
    workers_.emplace_back([this, thread] { work(thread); });
}

Team::~Team() {
  stop_.store(true);
  round_.fetch_add(1);
  round_.notify_all();
}

void Team::split(std::int64_t count, const std::function<void(std::int64_t, std::int64_t)>& fn) {
  if (threads_ == 1 || count < threads_) {
    fn(0, count);
    return;
  }
  count_ = count;
  fn_ = &fn;
  busy_.store(threads_ - 1);
  round_.fetch_add(1);
  round_.notify_all();
  run_part(0);
  for (int busy = busy_.load(); busy != 0; busy = busy_.load()) busy_.wait(busy);
}

void Team::run_part(int thread) const {
  const std::int64_t begin = count_ * thread / threads_;
  const std::int64_t end = count_ * (thread + 1) / threads_;
  (*fn_)(begin, end);
}

void Team::work(int thread) {
  for (std::uint32_t seen = 0;; ++seen) {
    round_.wait(seen);
    if (stop_.load()) return;
    run_part(thread);
    if (busy_.fetch_sub(1) == 1) busy_.notify_one();
  }
}

}  // namespace wherry
