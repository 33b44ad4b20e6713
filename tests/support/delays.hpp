// Random delays of signals, and routings that change from step to step.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <stop_token>
#include <thread>
#include <vector>

#include "exchange/config.hpp"
#include "fabric/faulty/fabric.hpp"
#include "support/layer.hpp"

namespace wherry::test {

// Now and then a rank is late with a signal, each rank at its own times.
inline void delay_signals(Group& group, const ExchangeConfig& config) {
  const Placement placement = placement_of(config, group.size());
  auto random = std::make_shared<std::mt19937>(100 + group.rank());
  FaultScript script;
  script.before = [random](const SignalEvent&) {
    if ((*random)() % 64 == 0)
      std::this_thread::sleep_for(std::chrono::microseconds((*random)() % 300));
    return true;
  };
  make_faulty(group, layout::make_window_layout(capacity_of(config, placement).params), script);
}

// Keeps a rank's signals back and sends them from a thread of its own, in any order. What a signal
// makes visible was written before it came here.
class Reorderer {
 public:
  explicit Reorderer(unsigned seed)
      : random_(seed),
        thread_([this](const auto& stop) { run(stop); }) {}
  void add(std::function<void()> send) {
    const std::scoped_lock lock(mutex_);
    waiting_.push_back(std::move(send));
  }

 private:
  void run(const std::stop_token& stop) {
    while (!stop.stop_requested() || !waiting_.empty()) {
      std::function<void()> send;
      {
        const std::scoped_lock lock(mutex_);
        if (!waiting_.empty()) {
          std::swap(waiting_[random_() % waiting_.size()], waiting_.back());
          send = std::move(waiting_.back());
          waiting_.pop_back();
        }
      }
      if (send) {
        send();
      } else {
        std::this_thread::sleep_for(std::chrono::microseconds(random_() % 100));
      }
    }
  }

  std::mutex mutex_;
  std::vector<std::function<void()>> waiting_;
  std::mt19937 random_;
  std::jthread thread_;
};

inline void reorder_signals(Group& group, const ExchangeConfig& config) {
  const Placement placement = placement_of(config, group.size());
  auto reorderer = std::make_shared<Reorderer>(200 + static_cast<unsigned>(group.rank()));
  FaultScript script;
  script.deliver = [reorderer](const SignalEvent&, std::function<void()> send) {
    reorderer->add(std::move(send));
  };
  make_faulty(group, layout::make_window_layout(capacity_of(config, placement).params), script);
}

inline Batch shifted(const Batch& batch, int step) {
  Batch other = batch;
  for (std::size_t i = 0; i < other.ids.size(); ++i) {
    if (other.ids[i] >= 0) other.ids[i] = (other.ids[i] + step) % other.experts;
  }
  return other;
}

// Paired steps with changing routing; every output of every step is compared.
inline void run_delayed_steps(Group& group, const Batch& batch, const ExchangeConfig& config,
                              int steps) {
  delay_signals(group, config);
  Exchange exchange(group, config);
  for (int step = 0; step < steps; ++step) {
    const Batch now = shifted(batch, step);
    expect_dense<Bf16>(exchange, now, run_layer<Bf16>(exchange, now));
  }
}

}  // namespace wherry::test
