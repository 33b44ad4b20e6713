// by_token over one global batch: the split over ranks must not show in a single bit.
#include <gtest/gtest.h>

#include "support/delays.hpp"

namespace wherry::test {
namespace {

class Split : public ::testing::TestWithParam<int> {};

TEST_P(Split, ByTokenIsBitwiseTheSameForThreadsAndProcesses) {
  const int ranks = GetParam();
  const Batch batch = make_batch(61, ranks, 13, 4, 40, 31, 0.1);
  const auto layer = [&](Group& group) {
    ExchangeConfig config = config_for(batch);
    run_and_verify<Bf16>(group, batch, config);  // the dense loop knows nothing of ranks
    config.layout = Layout::slots;
    run_and_verify<Bf16>(group, batch, config);
  };
  EXPECT_NO_THROW(run_threads(ranks, layer));
  EXPECT_NO_THROW(run_processes(ranks, layer));
}

INSTANTIATE_TEST_SUITE_P(OverRanks, Split, ::testing::Values(1, 2, 3, 4, 7, 8));

TEST(Processes, RunEveryLegalPairAsThreadsDo) {
  const Batch batch = make_batch(23, 3, 9, 3, 24, 32, 0.2);
  for (const auto& [layout, reduction] : {std::pair{Layout::grouped, Reduction::by_token},
                                          {Layout::grouped, Reduction::by_rank},
                                          {Layout::tokens, Reduction::by_rank},
                                          {Layout::slots, Reduction::by_rank}}) {
    ExchangeConfig config = config_for(batch);
    config.layout = layout;
    config.reduction = reduction;
    EXPECT_NO_THROW(
        run_processes(3, [&](Group& group) { run_and_verify<Bf16>(group, batch, config); }));
  }
}

TEST(Processes, HoldTheSameTokensAsThreadsDo) {
  const Batch batch = make_batch(40, 2, 5, 2, 16, 34);
  for (const CombineTo to : {CombineTo::all, CombineTo::share}) {
    ExchangeConfig config = config_for(batch);
    config.replicated = 3;
    config.combine_to = to;
    EXPECT_NO_THROW(
        run_processes(6, [&](Group& group) { run_and_verify<Bf16>(group, batch, config); }));
  }
}

TEST(Processes, TenThousandStepsUnderRandomDelaysAreBitwiseRight) {
  const Batch batch = make_batch(10, 3, 6, 2, 8, 33);
  for (const int depth : {1, 2}) {
    ExchangeConfig config = config_for(batch);
    config.depth = depth;
    EXPECT_NO_THROW(
        run_processes(3, [&](Group& group) { run_delayed_steps(group, batch, config, 10'000); }));
  }
}

}  // namespace
}  // namespace wherry::test
