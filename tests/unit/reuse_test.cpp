// Generations are reused thousands of times without a barrier, under random delays.
#include <gtest/gtest.h>

#include "support/delays.hpp"

namespace wherry::test {
namespace {

TEST(Reuse, PairedStepsUnderRandomDelaysAreBitwiseRight) {
  const Batch batch = make_batch(10, 3, 6, 2, 8, 41);
  for (const int depth : {1, 2}) {
    ExchangeConfig config = config_for(batch);
    config.depth = depth;
    run_threads(3, [&](Group& group) { run_delayed_steps(group, batch, config, 10'000); });
  }
}

TEST(Reuse, RowsOfAnUnpairedDispatchStayUntilThisRankIsDoneWithThem) {
  const Batch batch = make_batch(10, 3, 6, 2, 8, 42);
  const ExchangeConfig config = config_for(batch);
  run_threads(3, [&](Group& group) {
    delay_signals(group, config);
    Exchange exchange(group, config);
    Plan plan = exchange.make_plan();
    exchange.plan(batch.routing_of(group.rank()), plan);
    std::mt19937 random(static_cast<unsigned>(group.rank()));
    std::vector<Bf16> x = tokens_of<Bf16>(batch, group.rank());
    for (int step = 0; step < 500; ++step) {
      for (Bf16& value : x) value.bits = static_cast<std::uint16_t>(step);
      const Received r = exchange.dispatch(plan, view(x, 8));
      if (random() % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(200));
      for (std::int64_t row = 0; row < r.rows.rows; ++row) {
        for (int h = 0; h < 8; ++h) {
          expect(r.rows.row<Bf16>(row)[h].bits == step,
                 fmt::format("step {}: row {} holds step {}", step, row,
                             r.rows.row<Bf16>(row)[h].bits));
        }
      }
      if (step % 2 == 0) exchange.release(r);
    }
  });
}

TEST(Reuse, CountsOfThePlanAfterNextDoNotOverwriteThisOnes) {
  const Batch batch = make_batch(10, 4, 6, 2, 8, 43);
  const ExchangeConfig config = config_for(batch);
  run_threads(4, [&](Group& group) {
    delay_signals(group, config);
    Exchange exchange(group, config);
    Plan plan = exchange.make_plan();
    for (int step = 0; step < 3000; ++step) {
      const Batch now = shifted(batch, step);
      exchange.plan(now.routing_of(group.rank()), plan);
      std::int64_t want = 0;
      for (const std::int32_t id : now.ids) {
        want += exchange.placement().slot_to_rank()[static_cast<std::size_t>(id)] == group.rank()
                    ? 1
                    : 0;
      }
      expect(
          plan.to_host().rows_received == want,
          fmt::format("plan {}: {} rows, expected {}", step, plan.to_host().rows_received, want));
    }
  });
}

}  // namespace
}  // namespace wherry::test
