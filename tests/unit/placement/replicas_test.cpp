// Which replica serves a token, and that it changes no result.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <mutex>
#include <vector>

#include "support/layer.hpp"

namespace wherry::test {
namespace {

Placement three_replicas() { return Placement::from_slots(3, {0, 1, 0, 2, 0, 1}, {0, 2, 4, 6}); }

TEST(SlotFor, SharesTheTokensOfEveryRankEquallyAmongTheReplicas) {
  const Placement placement = three_replicas();
  for (int rank = 0; rank < 7; ++rank) {
    for (const int tokens : {1, 2, 3, 100, 101}) {
      std::vector<int> served(6, 0);
      for (int token = 0; token < tokens; ++token) {
        const int slot = placement.slot_for(0, token, rank);
        ASSERT_EQ(placement.slot_to_expert()[static_cast<std::size_t>(slot)], 0);
        ++served[static_cast<std::size_t>(slot)];
      }
      const std::vector<int> replicas = {served[0], served[2], served[4]};
      const auto [least, most] = std::minmax_element(replicas.begin(), replicas.end());
      EXPECT_LE(*most - *least, 1) << "rank " << rank << ", " << tokens << " tokens";
    }
  }
}

// Decoding: each rank has one token, and together they still spread.
TEST(SlotFor, SharesOneTokenARankEquallyToo) {
  const Placement placement = three_replicas();
  std::vector<int> served(6, 0);
  for (int rank = 0; rank < 12; ++rank)
    ++served[static_cast<std::size_t>(placement.slot_for(0, 0, rank))];
  EXPECT_EQ(served, (std::vector<int>{4, 0, 4, 0, 4, 0}));
}

TEST(SlotFor, IsAFunctionOfTokenAndSourceRankAlone) {
  const Placement placement = three_replicas(), again = three_replicas();
  for (int token = 0; token < 50; ++token) {
    for (int rank = 0; rank < 5; ++rank) {
      EXPECT_EQ(placement.slot_for(0, token, rank), again.slot_for(0, token, rank));
      EXPECT_EQ(placement.slot_for(1, token, rank), again.slot_for(1, token, rank));
    }
  }
}

template <typename T>
std::vector<std::vector<T>> outputs(const Batch& batch, const ExchangeConfig& config) {
  std::vector<std::vector<T>> all(static_cast<std::size_t>(batch.ranks()));
  std::mutex mutex;
  run_threads(batch.ranks(), [&](Group& group) {
    Exchange exchange(group, config);
    std::vector<T> out = run_layer<T>(exchange, batch);
    expect_dense<T>(exchange, batch, out);
    const std::scoped_lock lock(mutex);
    all[static_cast<std::size_t>(group.rank())] = std::move(out);
  });
  return all;
}

bool same_bits(const std::vector<std::vector<Bf16>>& a, const std::vector<std::vector<Bf16>>& b) {
  for (std::size_t r = 0; r < a.size(); ++r) {
    if (!std::equal(a[r].begin(), a[r].end(), b[r].begin(), b[r].end(),
                    [](Bf16 x, Bf16 y) { return x.bits == y.bits; }))
      return false;
  }
  return true;
}

TEST(Replicas, ChangeNoBitOfAResultSummedByToken) {
  for (const int ranks : {2, 4}) {
    const Batch batch = make_batch(61, ranks, 10, 3, 24, 5, 0.1);
    std::vector<double> counts(10, 0.0);
    for (const std::int32_t id : batch.ids)
      if (id >= 0) ++counts[static_cast<std::size_t>(id)];
    counts[3] += 100;  // a hot expert: several replicas
    for (const Layout layout : {Layout::grouped, Layout::slots}) {
      ExchangeConfig config = config_for(batch);
      config.layout = layout;
      const auto without = outputs<Bf16>(batch, config);
      for (const BalancePolicy policy : {BalancePolicy::best, BalancePolicy::reference}) {
        const BalancedLayer layer =
            balance({counts}, {.ranks = ranks, .slots = 16, .policy = policy})[0];
        EXPECT_GE(layer.replicas[3], 2);
        config.placement = layer.placement();
        EXPECT_TRUE(same_bits(outputs<Bf16>(batch, config), without))
            << ranks << " ranks, " << name(layout) << ", " << name(policy);
      }
      config.placement = std::nullopt;
    }
  }
}

// 128 experts and two more slots than that, as a decoding cluster would add them.
TEST(Replicas, ChangeNoBitWith128ExpertsAndTwoMoreSlots) {
  const Batch batch = make_batch(40, 2, 128, 8, 16, 6);
  ExchangeConfig config = config_for(batch);
  const auto without = outputs<Bf16>(batch, config);
  std::vector<double> counts(128, 1.0);
  counts[7] = 50;
  config.placement = balance({counts}, {.ranks = 2, .slots = 130})[0].placement();
  EXPECT_TRUE(same_bits(outputs<Bf16>(batch, config), without));
}

}  // namespace
}  // namespace wherry::test
