// Capacity formulas and both drop policies.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <numeric>
#include <tuple>

#include "reference.hpp"
#include "routed.hpp"

namespace {

using testing::ElementsAre;
using wherry::CapacityConfig;
using wherry::CapacityFormula;
using wherry::DropPolicy;
using wherry::RouterConfig;
using wherry::Selection;

using Triple = std::tuple<int, int, int>;  // token, expert, slot
using Triples = std::vector<Triple>;

// What is left, slots counted per expert in token order; sorted.
Triples triples_of(const std::vector<std::int32_t>& ids, int experts, int topk) {
  Triples triples;
  std::vector<int> next(static_cast<std::size_t>(experts));
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] < 0) continue;
    const int slot = next[static_cast<std::size_t>(ids[i])]++;
    triples.emplace_back(static_cast<int>(i) / topk, ids[i], slot);
  }
  std::sort(triples.begin(), triples.end());
  return triples;
}

struct WorkedCase {
  RouterConfig config;
  std::vector<float> logits;
  Triples probs, position;
};

// Their weights are the softmax itself, as in DeepSpeed, which divides by the sum after dropping.
const std::vector<WorkedCase>& worked_cases() {
  static const std::vector<WorkedCase> cases{
      {{.experts = 4, .topk = 2, .normalize = false},
       {.11F, .2F, .1F, .3F, .3F, .4F, .11F, .1F, .11F, .1F, .6F, .5F, .1F, .11F, .7F, .8F},
       {{0, 1, 0}, {1, 0, 0}, {1, 1, 1}, {2, 2, 0}, {2, 3, 0}, {3, 2, 1}, {3, 3, 1}},
       {{0, 1, 0}, {0, 3, 0}, {1, 0, 0}, {1, 1, 1}, {2, 2, 0}, {2, 3, 1}, {3, 2, 1}}},
      {{.experts = 6, .topk = 3, .normalize = false},
       {.5858F, .4801F, .6269F, .5397F, .9722F, .7034F, .5445F, .6332F,
        .4519F, .6308F, .0519F, .6450F, .4874F, .8110F, .7467F, .8474F,
        .0277F, .3068F, .8570F, .6714F, .5310F, .3274F, .4836F, .9892F},
       {{0, 2, 0},
        {0, 4, 0},
        {1, 1, 0},
        {1, 3, 0},
        {1, 5, 0},
        {2, 1, 1},
        {2, 2, 1},
        {2, 3, 1},
        {3, 0, 0},
        {3, 5, 1}},
       {{0, 2, 0},
        {0, 4, 0},
        {0, 5, 0},
        {1, 1, 0},
        {1, 3, 0},
        {1, 5, 1},
        {2, 1, 1},
        {2, 2, 1},
        {2, 3, 1},
        {3, 0, 0}}}};
  return cases;
}

TEST(Drop, TheWorkedCasesKeepTheirTriplesUnderBothPolicies) {
  for (const WorkedCase& worked : worked_cases()) {
    const std::int64_t capacity = wherry::expert_capacity(worked.config, 4, {});
    EXPECT_EQ(capacity, 2);
    for (const DropPolicy policy : {DropPolicy::probs, DropPolicy::position}) {
      Routed got = routed(worked.config, {.tokens = 4, .logits = worked.logits});
      wherry::drop_over_capacity(worked.config, capacity, policy, got.ids, got.weights);
      EXPECT_EQ(triples_of(got.ids, worked.config.experts, worked.config.topk),
                policy == DropPolicy::probs ? worked.probs : worked.position)
          << worked.config.experts << " experts, " << name(policy);
    }
  }
}

TEST(Capacity, TheWorkedCasesHoldUnderBothFormulas) {
  for (const CapacityFormula formula : {CapacityFormula::deepspeed, CapacityFormula::megatron}) {
    const auto capacity = [&](int tokens, int experts, int topk, CapacityConfig config) {
      config.formula = formula;
      return wherry::expert_capacity({.experts = experts, .topk = topk}, tokens, config);
    };
    EXPECT_EQ(capacity(8, 2, 2, {.factor = 2.0}), 16);
    EXPECT_EQ(capacity(8, 2, 1, {.factor = 4.0}), 16);
    EXPECT_EQ(capacity(3, 4, 1, {.factor = 8.0}), 6);
    EXPECT_EQ(capacity(3, 4, 1, {.factor = 1.0, .minimum = 8}), 8);
    EXPECT_EQ(capacity(0, 4, 1, {}), 0);
  }
}

TEST(Capacity, DeepSpeedRoundsInFp32AndMegatronInFp64) {
  // 100 * 1.1 is 110.00000000000001 in fp64 and 110 in fp32.
  const RouterConfig config{.experts = 10, .topk = 1};
  CapacityConfig capacity{.formula = CapacityFormula::deepspeed, .factor = 1.1};
  EXPECT_EQ(wherry::expert_capacity(config, 1000, capacity), 110);
  capacity.formula = CapacityFormula::megatron;
  EXPECT_EQ(wherry::expert_capacity(config, 1000, capacity), 111);
}

TEST(Drop, ReportsHowManyEachExpertLostAndZeroesTheirWeights) {
  const RouterConfig config{.experts = 3, .topk = 2};
  std::vector<std::int32_t> ids{0, 2, 0, 2, 2, 0, -1, 2};
  std::vector<float> weights{.5F, .5F, .1F, .9F, .7F, .3F, .6F, .4F};
  std::vector<std::int64_t> dropped{9, 9, 9};
  EXPECT_EQ(wherry::drop_over_capacity(config, 2, DropPolicy::probs, ids, weights, dropped), 3);
  EXPECT_THAT(dropped, ElementsAre(1, 0, 2));
  EXPECT_THAT(ids, ElementsAre(0, -1, -1, 2, 2, 0, -1, -1));
  EXPECT_THAT(weights, ElementsAre(.5F, 0, 0, .9F, .7F, .3F, .6F, 0));
}

TEST(Drop, EqualWeightsKeepTheEarliestTokens) {
  const RouterConfig config{.experts = 2, .topk = 1};
  for (const DropPolicy policy : {DropPolicy::probs, DropPolicy::position}) {
    std::vector<std::int32_t> ids(9, 1);
    std::vector<float> weights(9, 0.5F);
    EXPECT_EQ(wherry::drop_over_capacity(config, 4, policy, ids, weights), 5);
    EXPECT_THAT(ids, ElementsAre(1, 1, 1, 1, -1, -1, -1, -1, -1)) << name(policy);
  }
}

TEST(Drop, AnExpertTwiceInARowTakesTwoPlaces) {
  const RouterConfig config{.experts = 2, .topk = 2};
  std::vector<std::int32_t> ids{1, 1, 1, 1};
  std::vector<float> weights{.3F, .2F, .4F, .1F};
  wherry::drop_over_capacity(config, 3, DropPolicy::probs, ids, weights);
  EXPECT_THAT(ids, ElementsAre(1, 1, 1, -1));
}

TEST(Drop, ACapacityOfZeroDropsEverything) {
  const RouterConfig config{.experts = 2, .topk = 2};
  for (const DropPolicy policy : {DropPolicy::probs, DropPolicy::position}) {
    std::vector<std::int32_t> ids{0, 1, 1, -1};
    std::vector<float> weights(4, 1.0F);
    EXPECT_EQ(wherry::drop_over_capacity(config, 0, policy, ids, weights), 3);
    EXPECT_THAT(ids, testing::Each(-1));
  }
}

// The entries an expert keeps by a full sort of all of them.
std::vector<std::int32_t> kept_by_sorting(const RouterConfig& config, std::int64_t capacity,
                                          DropPolicy policy, std::vector<std::int32_t> ids,
                                          const std::vector<float>& weights) {
  for (int expert = 0; expert < config.experts; ++expert) {
    std::vector<std::size_t> entries;
    for (std::size_t i = 0; i < ids.size(); ++i) {
      if (ids[i] == expert) entries.push_back(i);
    }
    if (policy == DropPolicy::probs) {
      std::sort(entries.begin(), entries.end(), [&](std::size_t a, std::size_t b) {
        return weights[a] != weights[b] ? weights[a] > weights[b] : a < b;
      });
    }
    for (std::size_t i = static_cast<std::size_t>(capacity); i < entries.size(); ++i) {
      ids[entries[i]] = -1;
    }
  }
  return ids;
}

TEST(Drop, RandomRoutingsEqualAFullSort) {
  std::mt19937_64 engine(5);
  for (int trial = 0; trial < 300; ++trial) {
    const RouterConfig config{.experts = 1 + static_cast<int>(engine() % 9),
                              .topk = 1 + static_cast<int>(engine() % 4),
                              .selection = Selection::given};
    const std::size_t entries = engine() % 60 * static_cast<std::size_t>(config.topk);
    std::vector<std::int32_t> ids(entries);
    std::vector<float> weights(entries);
    for (auto& id : ids) {
      id = static_cast<std::int32_t>(engine() % static_cast<unsigned>(config.experts + 1)) - 1;
    }
    for (float& weight : weights) weight = static_cast<float>(engine() % 8) / 8.0F;
    const auto capacity = static_cast<std::int64_t>(engine() % 20);
    for (const DropPolicy policy : {DropPolicy::probs, DropPolicy::position}) {
      const std::vector<std::int32_t> want =
          kept_by_sorting(config, capacity, policy, ids, weights);
      std::vector<std::int32_t> got = ids;
      std::vector<float> got_weights = weights;
      std::vector<std::int64_t> dropped(static_cast<std::size_t>(config.experts));
      const std::int64_t total =
          wherry::drop_over_capacity(config, capacity, policy, got, got_weights, dropped);
      ASSERT_EQ(got, want) << "trial " << trial << ", " << name(policy);
      EXPECT_EQ(total, std::accumulate(dropped.begin(), dropped.end(), std::int64_t{0}));
      EXPECT_EQ(total,
                std::count(got.begin(), got.end(), -1) - std::count(ids.begin(), ids.end(), -1));
    }
  }
}

}  // namespace
