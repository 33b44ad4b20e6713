// Random delays of signals, and routings that change from step to step.
#pragma once

#include <chrono>
#include <memory>
#include <random>
#include <thread>

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
