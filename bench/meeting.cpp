#include "meeting.hpp"

#include <sched.h>

#include <atomic>
#include <chrono>

#include "group/state.hpp"
#include "support/check.hpp"

namespace wherry::bench {

namespace {

constexpr std::uint64_t kBytes = 4096;
constexpr std::uint64_t kArrivals = 2048;  // behind what a fabric keeps at the start of a window
constexpr int kSpins = 100;
constexpr int kYieldsBetweenChecks = 4096;

}  // namespace

std::int64_t now_ns() noexcept {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

Meeting::Meeting(const Group& group, Seconds deadline)
    : rank_(group.rank()),
      size_(group.size()),
      deadline_(deadline),
      fabric_(group.state().connect(group, {kBytes, true, deadline})),
      arrivals_(reinterpret_cast<std::uint64_t*>(fabric_->window(0) + kArrivals)) {
  group.barrier();  // every window is mapped
}

void Meeting::meet() {
  expected_ += static_cast<std::uint64_t>(size_);
  const std::atomic_ref arrivals(*arrivals_);
  if (arrivals.fetch_add(1, std::memory_order_acq_rel) + 1 == expected_) return;
  const auto all_came = [&] { return arrivals.load(std::memory_order_acquire) >= expected_; };
  for (int i = 0; i < kSpins; ++i) {
    if (all_came()) return;
  }
  const std::int64_t since = now_ns();
  for (int yields = 1; !all_came(); ++yields) {
    sched_yield();
    if (yields % kYieldsBetweenChecks == 0) give_up_if_hopeless(since);
  }
}

void Meeting::give_up_if_hopeless(std::int64_t since_ns) {
  for (int peer = 0; peer < size_; ++peer) {
    WHERRY_CHECK(peer == rank_ || fabric_->alive(peer), ErrorCode::peer_failed,
                 (Error::Where{Stage::group, rank_, peer}),
                 "rank {} has ended before the meeting of a step", peer);
  }
  const double waited = static_cast<double>(now_ns() - since_ns) * 1e-9;
  WHERRY_CHECK(waited < deadline_.count(), ErrorCode::timeout,
               (Error::Where{Stage::group, rank_, -1}),
               "a rank did not come to the meeting of a step within {:g} s", deadline_.count());
}

}  // namespace wherry::bench
