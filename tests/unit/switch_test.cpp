// Loads that an exchange counts, and experts that move between its steps.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>

#include "support/layer.hpp"

namespace wherry::test {
namespace {

using ::testing::HasSubstr;

// 6 experts in 9 slots of 3 ranks.
Placement replicated(std::vector<int> slot_to_expert) {
  return Placement::from_slots(6, std::move(slot_to_expert), {0, 3, 6, 9});
}
const Placement kFirst = replicated({0, 1, 2, 3, 4, 5, 0, 1, 2});
const Placement kSecond = replicated({5, 4, 3, 2, 1, 0, 5, 5, 4});
const Placement kWithEmptySlots = replicated({0, -1, 2, 3, 4, 5, -1, 1, -1});

std::vector<std::int64_t> loads_of(const Batch& batch) {
  std::vector<std::int64_t> loads(static_cast<std::size_t>(batch.experts), 0);
  for (const std::int32_t id : batch.ids) {
    if (id >= 0) ++loads[static_cast<std::size_t>(id)];
  }
  return loads;
}

TEST(Switch, LoadsCountTheTokensOfEveryExpertOnEveryRankAlike) {
  const Batch batch = make_batch(50, 3, 6, 2, 8, 91, 0.2);
  const std::vector<std::int64_t> once = loads_of(batch);
  for (const Layout layout : {Layout::grouped, Layout::tokens, Layout::slots}) {
    ExchangeConfig config = config_for(batch);
    config.layout = layout;
    config.reduction = std::nullopt;
    config.placement = kFirst;
    run_threads(3, [&](Group& group) {
      Exchange exchange(group, config);
      for (int step = 1; step <= 3; ++step) {
        static_cast<void>(run_layer<Bf16>(exchange, batch));
        for (std::size_t e = 0; e < once.size(); ++e) {
          expect(exchange.loads()[e] == step * once[e], fmt::format("expert {}", e));
        }
      }
      exchange.reset_loads();
      for (const std::int64_t load : exchange.loads()) expect(load == 0, "reset");
    });
  }
}

TEST(Switch, ResultsKeepEveryBitWhereverTheExpertsMove) {
  const Batch batch = make_batch(50, 3, 6, 2, 8, 92, 0.1);
  for (const Layout layout : {Layout::grouped, Layout::slots}) {
    ExchangeConfig config = config_for(batch);
    config.layout = layout;
    config.depth = 2;
    config.placement = kFirst;
    run_threads(3, [&](Group& group) {
      Exchange exchange(group, config);
      for (int round = 0; round < 20; ++round) {
        for (const Placement& placement : {kSecond, kWithEmptySlots, kFirst}) {
          expect_dense<Bf16>(exchange, batch, run_layer<Bf16>(exchange, batch));
          exchange.set_placement(placement);
          expect(exchange.placement() == placement, "the placement did not change");
        }
      }
    });
  }
}

// What the loads are for: every rank finds the same better placement by itself.
TEST(Switch, EveryRankBalancesByItsOwnLoadsAndAllAgree) {
  Batch batch = make_batch(60, 3, 6, 1, 8, 93);
  for (std::size_t i = 0; i < batch.ids.size(); ++i) {
    if (i % 3 != 0) batch.ids[i] = 2;  // two thirds go to one expert
  }
  ExchangeConfig config = config_for(batch);
  config.placement = kFirst;
  run_threads(3, [&](Group& group) {
    Exchange exchange(group, config);
    static_cast<void>(run_layer<Bf16>(exchange, batch));
    const std::vector<double> loads(exchange.loads().begin(), exchange.loads().end());
    const BalancedLayer better = balance({loads}, {.ranks = 3, .slots = 9}).front();
    expect(better.imbalance < imbalance(rank_loads(exchange.placement(), loads)), "no better");
    exchange.set_placement(better.placement());
    expect_dense<Bf16>(exchange, batch, run_layer<Bf16>(exchange, batch));
  });
}

TEST(Switch, ARankThatDoesNotSwitchIsNoticedByAllAndTheExchangeGoesOn) {
  const Batch batch = make_batch(20, 3, 6, 2, 8, 94);
  ExchangeConfig config = config_for(batch);
  config.placement = kFirst;
  std::atomic<int> noticed{0};
  run_threads(3, [&](Group& group) {
    Exchange exchange(group, config);
    if (group.rank() != 1) exchange.set_placement(kSecond);
    Plan plan = exchange.make_plan();
    try {
      exchange.plan(batch.routing_of(group.rank()), plan);
    } catch (const Error& error) {
      expect(error.code() == ErrorCode::config_mismatch && error.peer() == 1, error.what());
      ++noticed;
    }
    for (const std::int64_t load : exchange.loads()) expect(load == 0, "counted what failed");
    if (group.rank() == 1) exchange.set_placement(kSecond);
    expect_dense<Bf16>(exchange, batch, run_layer<Bf16>(exchange, batch));
  });
  EXPECT_EQ(noticed, 3);
}

TEST(Switch, WhatCannotBeSwitchedIsRefused) {
  const Batch batch = make_batch(20, 1, 6, 2, 8, 95);
  ExchangeConfig config = config_for(batch);
  config.placement = Placement::from_slots(6, {0, 1, 2, 3, 4, 5, 0}, {0, 7});
  const Placement other = Placement::from_slots(6, {5, 4, 3, 2, 1, 0, 5}, {0, 7});
  run_threads(1, [&](Group& group) {
    Exchange exchange(group, config);
    const auto refusal = [](ErrorCode code, const auto& call) {
      try {
        call();
      } catch (const Error& error) {
        expect(error.code() == code, error.what());
        return std::string(error.what());
      }
      return std::string();
    };
    EXPECT_THAT(refusal(ErrorCode::bad_argument,
                        [&] { exchange.set_placement(Placement::contiguous(6, 1)); }),
                HasSubstr("slots [0 6)"));
    EXPECT_THAT(refusal(ErrorCode::bad_argument,
                        [&] { exchange.set_placement(Placement::contiguous(7, 1)); }),
                HasSubstr("7 experts"));
    Plan plan = exchange.make_plan();
    exchange.plan(batch.routing_of(0), plan);
    std::vector<Bf16> x = tokens_of<Bf16>(batch, 0);
    auto handle = exchange.dispatch_begin(plan, view(x, 8));
    EXPECT_THAT(refusal(ErrorCode::misuse, [&] { exchange.set_placement(other); }),
                HasSubstr("in flight"));
    exchange.release(handle.finish());
    exchange.set_placement(other);
    EXPECT_THAT(
        refusal(ErrorCode::misuse, [&] { static_cast<void>(exchange.dispatch(plan, view(x, 8))); }),
        HasSubstr("fill it again"));
    expect_dense<Bf16>(exchange, batch, run_layer<Bf16>(exchange, batch));
  });
}

}  // namespace
}  // namespace wherry::test
