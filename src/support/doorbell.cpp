#include "support/doorbell.hpp"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <ctime>

namespace wherry {

thread_local int Doorbell::spins_ = 100;
thread_local int Doorbell::yields_ = 200;

void Doorbell::ring() const {
  // An RMW, not a load: it is ordered after the caller's store and against Sleeper's RMW.
  if (std::atomic_ref(sleepers_).fetch_add(0, std::memory_order_seq_cst) == 0) return;
  std::atomic_ref(bell_).fetch_add(1, std::memory_order_release);
  // Not FUTEX_PRIVATE: the word may be in memory shared between processes.
  syscall(SYS_futex, &bell_, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void Doorbell::relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

void Doorbell::yield() { sched_yield(); }

void Doorbell::sleep(std::uint32_t seen, Clock::time_point deadline) const {
  const auto left = std::chrono::duration_cast<std::chrono::nanoseconds>(deadline - Clock::now());
  const auto most = std::chrono::duration_cast<std::chrono::nanoseconds>(kTick);
  const auto nap = std::clamp(left, std::chrono::nanoseconds(100'000), most);
  timespec ts{};
  ts.tv_nsec = static_cast<long>(nap.count());
  syscall(SYS_futex, &bell_, FUTEX_WAIT, seen, &ts, nullptr, 0);
}

}  // namespace wherry
