// Ids that do not come from the scores: hash routing and input that is already routed.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "reference.hpp"
#include "routed.hpp"

namespace {

using testing::ElementsAre;
using testing::FloatEq;
using wherry::RouterConfig;
using wherry::Score;
using wherry::Selection;

const RouterConfig kHash{.experts = 4,
                         .topk = 2,
                         .score = Score::sqrtsoftplus,
                         .selection = Selection::hash,
                         .scale = 1.5F};

TEST(Hash, TheTableChoosesAndTheLogitsWeigh) {
  const std::vector<std::int32_t> table{0, 1, 3, 2, 1, 2};  // a vocabulary of three
  const std::vector<std::int64_t> token_ids{2, 0, 1};
  std::mt19937_64 engine(3);
  const std::vector<float> logits = reference::gaussian(12, 2.0, engine);
  const Routed got =
      routed(kHash, {.tokens = 3, .logits = logits, .token_ids = token_ids, .hash_table = table});
  EXPECT_THAT(got.ids, ElementsAre(1, 2, 0, 1, 3, 2));
  for (std::size_t t = 0; t < 3; ++t) {
    const std::vector<double> x(logits.begin() + static_cast<std::ptrdiff_t>(4 * t),
                                logits.begin() + static_cast<std::ptrdiff_t>(4 * t + 4));
    const std::vector<double> want =
        reference::weights_of(kHash, x, {got.ids[2 * t], got.ids[2 * t + 1]});
    EXPECT_FLOAT_EQ(got.weights[2 * t], static_cast<float>(want[0]));
    EXPECT_FLOAT_EQ(got.weights[2 * t + 1], static_cast<float>(want[1]));
  }
}

TEST(Hash, AnExpertTwiceInARowCountsTwice) {
  const std::vector<std::int32_t> table{3, 3};
  const std::vector<std::int64_t> token_ids{0};
  const std::vector<float> logits{5.0F, 5.0F, 5.0F, -1.0F};
  const Routed got =
      routed(kHash, {.tokens = 1, .logits = logits, .token_ids = token_ids, .hash_table = table});
  EXPECT_THAT(got.ids, ElementsAre(3, 3));
  EXPECT_THAT(got.weights, ElementsAre(0.75F, 0.75F));
}

TEST(Hash, WithoutATableTheSameTokenAlwaysGoesToTheSameExperts) {
  const std::vector<std::int64_t> token_ids{128'000, 5, 128'000};
  const std::vector<float> logits(12, 1.0F);
  const Routed got = routed(kHash, {.tokens = 3, .logits = logits, .token_ids = token_ids});
  EXPECT_EQ(got.ids[0], got.ids[4]);
  EXPECT_EQ(got.ids[1], got.ids[5]);
  for (int k = 0; k < 2; ++k) {
    EXPECT_EQ(got.ids[static_cast<std::size_t>(2 + k)], wherry::hash_expert(5, k, 4));
  }
}

TEST(Hash, SpreadsAVocabularyEvenlyOverTheExperts) {
  for (const int experts : {7, 256, 384}) {
    std::vector<int> counts(static_cast<std::size_t>(experts));
    for (std::int64_t token_id = 0; token_id < 129'280; ++token_id) {
      for (int k = 0; k < 6; ++k) {
        const std::int32_t expert = wherry::hash_expert(token_id, k, experts);
        ASSERT_TRUE(expert >= 0 && expert < experts);
        ++counts[static_cast<std::size_t>(expert)];
      }
    }
    const double mean = 129'280.0 * 6 / experts;
    const auto [least, most] = std::minmax_element(counts.begin(), counts.end());
    EXPECT_GT(*least, mean - 5 * std::sqrt(mean)) << experts;
    EXPECT_LT(*most, mean + 5 * std::sqrt(mean)) << experts;
  }
}

TEST(Hash, IsTheSameOnEveryMachine) {
  EXPECT_THAT((std::vector{wherry::hash_expert(0, 0, 256), wherry::hash_expert(0, 1, 256),
                           wherry::hash_expert(1, 0, 256), wherry::hash_expert(129'279, 5, 384)}),
              ElementsAre(130, 108, 45, 153));
}

TEST(AlreadyRouted, IdsAndWeightsPassThroughUnchanged) {
  const RouterConfig config{
      .experts = 100, .topk = 4, .selection = Selection::given, .scale = 9.0F};
  const std::vector<std::int32_t> ids{5, 88, 88, 65, -1, -1, -1, -1};
  const std::vector<float> weights{0.1F, 0.3F, 0.2F, 0.4F, 7.0F, 7.0F, 7.0F, 7.0F};
  const Routed got = routed(config, {.tokens = 2, .ids = ids, .weights = weights});
  EXPECT_EQ(got.ids, ids);
  EXPECT_EQ(got.weights, weights);
}

TEST(AlreadyRouted, LogitsWeighTheGivenIdsAndSkipNoExpert) {
  const RouterConfig config{.experts = 3, .topk = 3, .selection = Selection::given};
  const std::vector<float> logits{std::log(1.0F), std::log(2.0F), std::log(3.0F)};
  const std::vector<std::int32_t> ids{2, -1, 0};
  const Routed got = routed(config, {.tokens = 1, .logits = logits, .ids = ids});
  EXPECT_EQ(got.ids, ids);
  EXPECT_THAT(got.weights, ElementsAre(FloatEq(0.75F), 0.0F, FloatEq(0.25F)));
}

TEST(AlreadyRouted, ARowOfNoExpertsWeighsNothingUnderEveryScore) {
  const std::vector<float> logits{1.0F, 2.0F};
  const std::vector<std::int32_t> ids{-1, -1};
  for (const Score score :
       {Score::softmax, Score::sigmoid, Score::sqrtsoftplus, Score::topk_softmax}) {
    const RouterConfig config{
        .experts = 2, .topk = 2, .score = score, .selection = Selection::given};
    const Routed got = routed(config, {.tokens = 1, .logits = logits, .ids = ids});
    EXPECT_EQ(got.ids, ids);
    EXPECT_THAT(got.weights, ElementsAre(0.0F, 0.0F)) << name(score);
  }
}

TEST(AlreadyRouted, TheOutputMayBeTheInput) {
  const RouterConfig config{.experts = 9, .topk = 2, .selection = Selection::given};
  std::vector<std::int32_t> ids{5, 8};
  std::vector<float> weights{0.5F, 0.25F};
  const wherry::Routing routing =
      wherry::route(config, {.tokens = 1, .ids = ids, .weights = weights}, ids, weights);
  EXPECT_EQ(routing.id(0, 1), 8);
  EXPECT_EQ(routing.weight(0, 1), 0.25F);
}

}  // namespace
