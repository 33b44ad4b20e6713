// Bounded waiting: spin briefly, then yield, then sleep on a futex, because ranks may outnumber
// cores. Measured on two cores: a one-way flag costs 0.2 us spinning when pinned but 8 ms when
// eight processes spin; yield 1-2 us; futex 26 us. So: 100 spins, 200 yields, then sleep. Threads
// that are bound to their processors wait otherwise (group/bind.hpp has the measurement): without
// yields, long for another processor, whose sleepers take long to wake, and not at all for one that
// can run only when they sleep.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace wherry {

using Clock = std::chrono::steady_clock;

// Two words in memory that may be shared between processes. A waiter sleeps on `bell`; whoever
// changes what it waits for rings. No syscall is made while nobody sleeps.
class Doorbell {
 public:
  Doorbell(std::uint32_t& bell, std::uint32_t& sleepers) : bell_(bell), sleepers_(sleepers) {}

  // Called after the store that a waiter may be waiting for.
  void ring() const;

  // Waits until ready() or until tick() returns true; returns ready(). tick() is called about every
  // kTick while asleep and once `deadline` has passed; it decides what to give up for. `beside`: who
  // will ring is bound to this thread's only processor.
  template <typename Ready, typename Tick>
  bool wait(Clock::time_point deadline, Ready ready, Tick tick, bool beside = false) const {
    for (int i = 0; i < (beside ? 1 : spins_); ++i) {
      if (ready()) return true;
      relax();
    }
    for (int i = 0; i < yields_; ++i) {
      if (ready()) return true;
      yield();
    }
    const Sleeper counted(sleepers_);
    for (;;) {
      const std::uint32_t seen = std::atomic_ref(bell_).load(std::memory_order_acquire);
      if (ready()) return true;
      if (tick()) return ready();
      sleep(seen, deadline);
    }
  }

  static constexpr std::chrono::milliseconds kTick{20};

  // From now on this thread waits as one that is bound to its processors.
  static void wait_bound() {
    spins_ = 1000;
    yields_ = 0;
  }

 private:
  static thread_local int spins_;
  static thread_local int yields_;

  // The RMW on `sleepers` orders it against the one in ring(): either ring() sees the sleeper, or
  // the sleeper's next ready() sees what was stored before ring().
  struct Sleeper {
    explicit Sleeper(std::uint32_t& count) : count_(count) {
      std::atomic_ref(count_).fetch_add(1, std::memory_order_seq_cst);
    }
    ~Sleeper() { std::atomic_ref(count_).fetch_sub(1, std::memory_order_seq_cst); }
    Sleeper(const Sleeper&) = delete;
    Sleeper& operator=(const Sleeper&) = delete;
    std::uint32_t& count_;
  };

  static void relax();
  static void yield();
  void sleep(std::uint32_t seen, Clock::time_point deadline) const;

  std::uint32_t& bell_;
  std::uint32_t& sleepers_;
};

}  // namespace wherry
