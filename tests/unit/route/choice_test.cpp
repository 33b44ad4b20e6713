// Which experts are chosen and what they weigh: rules worked by hand.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "reference.hpp"
#include "routed.hpp"

namespace {

using testing::Each;
using testing::ElementsAre;
using testing::FloatEq;
using wherry::RouterConfig;
using wherry::Score;
using wherry::Selection;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

float logit_of(double sigmoid) { return static_cast<float>(std::log(sigmoid / (1.0 - sigmoid))); }
float log_of(double value) { return static_cast<float>(std::log(value)); }

TEST(Choice, MixtralDividesTheSoftmaxByTheSumOfTheKept) {
  const std::vector<float> logits{log_of(1), log_of(2), log_of(4), log_of(3)};
  const Routed got = routed({.experts = 4, .topk = 2}, {.tokens = 1, .logits = logits});
  EXPECT_THAT(got.ids, ElementsAre(2, 3));
  EXPECT_THAT(got.weights, ElementsAre(FloatEq(4.0F / 7), FloatEq(3.0F / 7)));
}

TEST(Choice, Qwen3DividesOnlyWhenAskedTo) {
  const std::vector<float> logits{log_of(1), log_of(2), log_of(4), log_of(3)};
  const Routed got =
      routed({.experts = 4, .topk = 2, .normalize = false}, {.tokens = 1, .logits = logits});
  EXPECT_THAT(got.ids, ElementsAre(2, 3));
  EXPECT_THAT(got.weights, ElementsAre(FloatEq(0.4F), FloatEq(0.3F)));
}

TEST(Choice, GptOssTakesTheSoftmaxOfTheChosenLogits) {
  const std::vector<float> logits{log_of(1), log_of(6), log_of(0.5), log_of(2)};
  const RouterConfig config{
      .experts = 4, .topk = 2, .score = Score::topk_softmax, .normalize = false};
  const Routed got = routed(config, {.tokens = 1, .logits = logits});
  EXPECT_THAT(got.ids, ElementsAre(1, 3));
  EXPECT_THAT(got.weights, ElementsAre(FloatEq(0.75F), FloatEq(0.25F)));
}

TEST(Choice, Llama4PutsTheSigmoidOnTheInputAndLeavesCombineWithoutWeights) {
  const std::vector<float> logits{-1.0F, logit_of(0.75), 0.5F};
  const RouterConfig config{.experts = 3,
                            .topk = 1,
                            .score = Score::sigmoid,
                            .normalize = false,
                            .weight_on_input = true};
  std::vector<std::int32_t> ids(1);
  std::vector<float> weights(1);
  const wherry::Routing routing =
      wherry::route(config, {.tokens = 1, .logits = logits}, ids, weights);
  EXPECT_EQ(routing.id(0, 0), 1);
  EXPECT_THAT(weights, ElementsAre(FloatEq(0.75F)));
  EXPECT_EQ(routing.weights, nullptr);
  EXPECT_EQ(routing.weight(0, 0), 1.0F);
}

TEST(Choice, Llama4TellsLargeLogitsApartWhoseSigmoidsAreEqual) {
  const std::vector<float> logits{30.0F, 40.0F, 35.0F};
  const RouterConfig config{.experts = 3, .topk = 1, .score = Score::sigmoid, .normalize = false};
  EXPECT_THAT(routed(config, {.tokens = 1, .logits = logits}).ids, ElementsAre(1));
}

TEST(Choice, DeepSeekV3ChoosesByTheBiasedScoreAndWeighsByTheOther) {
  const std::vector<float> logits{logit_of(0.5), logit_of(0.25), logit_of(0.75), logit_of(0.125)};
  const std::vector<float> bias{0.0F, 1.0F, 0.0F, 0.0F};
  const RouterConfig config{
      .experts = 4, .topk = 2, .score = Score::sigmoid, .bias = true, .scale = 2.5F};
  const Routed got = routed(config, {.tokens = 1, .logits = logits, .bias = bias});
  EXPECT_THAT(got.ids, ElementsAre(1, 2));
  EXPECT_THAT(got.weights, ElementsAre(FloatEq(0.25F * 2.5F), FloatEq(0.75F * 2.5F)));
}

TEST(Choice, GroupsAreRankedByTheSumOfTheirTwoLargestScores) {
  // Group 0 holds the largest score, group 1 the largest pair, group 2 the largest triple.
  const std::vector<float> logits{logit_of(0.9), logit_of(0.1), logit_of(0.1),
                                  logit_of(0.6), logit_of(0.7), logit_of(0.1),
                                  logit_of(0.6), logit_of(0.6), logit_of(0.6)};
  RouterConfig config{
      .experts = 9, .topk = 2, .score = Score::sigmoid, .groups = 3, .groups_kept = 1};
  EXPECT_THAT(routed(config, {.tokens = 1, .logits = logits}).ids, ElementsAre(4, 3));
  config.groups_kept = 2;
  EXPECT_THAT(routed(config, {.tokens = 1, .logits = logits}).ids, ElementsAre(4, 3));
  config.groups_kept = 3;
  EXPECT_THAT(routed(config, {.tokens = 1, .logits = logits}).ids, ElementsAre(0, 4));
}

TEST(Choice, DroppedGroupsAreMaskedWithMinusInfinityNotZero) {
  // Group 0 stays with c = {-0.1, -0.2}; a mask of 0 would choose from group 1, which is dropped.
  const std::vector<float> logits(4, 0.0F);
  const std::vector<float> bias{-0.6F, -0.7F, -0.8F, -0.9F};
  const RouterConfig config{.experts = 4,
                            .topk = 2,
                            .score = Score::sigmoid,
                            .groups = 2,
                            .groups_kept = 1,
                            .bias = true};
  const Routed got = routed(config, {.tokens = 1, .logits = logits, .bias = bias});
  EXPECT_THAT(got.ids, ElementsAre(0, 1));
  EXPECT_THAT(got.weights, ElementsAre(0.5F, 0.5F));
}

TEST(Choice, DeepSeekV4ScoresWithTheRootOfSoftplus) {
  const auto logit = [](double s) { return static_cast<float>(std::log(std::expm1(s * s))); };
  const std::vector<float> logits{logit(1.0), logit(3.0), logit(0.5), logit(0.25)};
  const RouterConfig config{.experts = 4, .topk = 3, .score = Score::sqrtsoftplus, .scale = 1.5F};
  const Routed got = routed(config, {.tokens = 1, .logits = logits});
  EXPECT_THAT(got.ids, ElementsAre(1, 0, 2));
  EXPECT_NEAR(got.weights[0], 1.5F * 3.0F / 4.5F, 2e-7F);
  EXPECT_NEAR(got.weights[1], 1.5F * 1.0F / 4.5F, 2e-7F);
  EXPECT_NEAR(got.weights[2], 1.5F * 0.5F / 4.5F, 2e-7F);
}

TEST(Choice, ExactTiesGoToTheLowestExpertForEveryScore) {
  std::vector<float> logits(64, 0.25F);
  logits[40] = logits[41] = logits[50] = 1.5F;
  for (const Score score :
       {Score::softmax, Score::sigmoid, Score::sqrtsoftplus, Score::topk_softmax}) {
    const RouterConfig config{.experts = 64, .topk = 5, .score = score};
    const Routed got = routed(config, {.tokens = 1, .logits = logits});
    EXPECT_THAT(got.ids, ElementsAre(40, 41, 50, 0, 1)) << name(score);
  }
}

TEST(Choice, ExactTiesOfGroupsGoToTheLowestGroup) {
  const std::vector<float> logits(32, -0.5F);
  const std::vector<float> bias(32, 0.125F);
  for (const Score score :
       {Score::softmax, Score::sigmoid, Score::sqrtsoftplus, Score::topk_softmax}) {
    const RouterConfig config{
        .experts = 32, .topk = 6, .score = score, .groups = 8, .groups_kept = 2, .bias = true};
    const Routed got = routed(config, {.tokens = 1, .logits = logits, .bias = bias});
    EXPECT_THAT(got.ids, ElementsAre(0, 1, 2, 3, 4, 5)) << name(score);
  }
}

TEST(Choice, ScoresThatAreEqualAsFp32TieUnderABias) {
  const std::vector<float> logits{30.0F, 40.0F, 0.0F};  // both sigmoids are 1 in fp32
  const std::vector<float> bias(3, 0.0F);
  const RouterConfig config{.experts = 3, .topk = 1, .score = Score::sigmoid, .bias = true};
  EXPECT_THAT(routed(config, {.tokens = 1, .logits = logits, .bias = bias}).ids, ElementsAre(0));
}

TEST(Choice, RandomRowsFullOfTiesEqualAFullSort) {
  std::mt19937_64 engine(7);
  for (int trial = 0; trial < 2000; ++trial) {
    const int experts = 1 + static_cast<int>(engine() % 40);
    const RouterConfig config{
        .experts = experts,
        .topk = 1 + static_cast<int>(engine() % static_cast<unsigned>(experts)),
        .score = Score::sigmoid};
    std::vector<float> logits(static_cast<std::size_t>(experts));
    for (float& x : logits) x = static_cast<float>(engine() % 4);
    const Routed got = routed(config, {.tokens = 1, .logits = logits});
    const reference::Row want = reference::route(config, logits, {});
    ASSERT_EQ(got.ids, want.ids) << "trial " << trial;
  }
}

TEST(Choice, ExtremeLogitsNeverGiveNaN) {
  const std::vector<float> logits{-kInfinity, 3e38F, -3e38F, -kInfinity, -1e4F, 0.0F};
  for (const Score score :
       {Score::softmax, Score::sigmoid, Score::sqrtsoftplus, Score::topk_softmax}) {
    for (const bool normalize : {false, true}) {
      const RouterConfig config{.experts = 6, .topk = 6, .score = score, .normalize = normalize};
      const Routed got = routed(config, {.tokens = 1, .logits = logits});
      EXPECT_THAT(got.ids, ElementsAre(1, 5, 4, 2, 0, 3)) << name(score);
      for (const float w : got.weights) EXPECT_TRUE(std::isfinite(w)) << name(score);
    }
  }
}

TEST(Choice, ExpertsAtMinusInfinityWeighZeroEvenAllTogether) {
  const std::vector<float> logits{1.0F, -kInfinity, -kInfinity};
  const std::vector<std::int32_t> ids{1, 2};
  for (const Score score :
       {Score::softmax, Score::sigmoid, Score::sqrtsoftplus, Score::topk_softmax}) {
    const RouterConfig config{
        .experts = 3, .topk = 2, .score = score, .selection = Selection::given};
    const Routed got = routed(config, {.tokens = 1, .logits = logits, .ids = ids});
    EXPECT_THAT(got.weights, Each(0.0F)) << name(score);
  }
}

TEST(Choice, UnlikelyExpertsStillShareWeightsThatSumToOne) {
  // Chosen by the bias alone; exp(-800) is 0 in fp64, their ratio is not.
  const std::vector<float> logits{0.0F, -800.0F, -800.0F + static_cast<float>(std::log(3.0))};
  const std::vector<float> bias{0.0F, 2.0F, 2.0F};
  const Routed got = routed({.experts = 3, .topk = 2, .bias = true},
                            {.tokens = 1, .logits = logits, .bias = bias});
  EXPECT_THAT(got.ids, ElementsAre(1, 2));
  EXPECT_NEAR(got.weights[0], 0.25F, 1e-5F);
  EXPECT_NEAR(got.weights[1], 0.75F, 1e-5F);
}

TEST(Choice, OddShapesEqualTheReference) {
  std::mt19937_64 engine(11);
  for (const int experts : {1, 7, 129, 1025}) {
    for (const int topk : {1, 6, 7, 9, 12, 16, 22, 32}) {
      if (topk > experts) continue;
      const RouterConfig config{.experts = experts, .topk = topk};
      const std::vector<float> logits =
          reference::gaussian(static_cast<std::size_t>(experts), 1.0, engine);
      const Routed got = routed(config, {.tokens = 1, .logits = logits});
      EXPECT_EQ(got.ids, reference::route(config, logits, {}).ids) << experts << ", " << topk;
    }
  }
}

TEST(Choice, ARankWithoutTokensIsLegal) {
  EXPECT_TRUE(routed({.experts = 8, .topk = 2}, {}).ids.empty());
}

}  // namespace
