// Balance losses against plain fp64 sums, and their gradients against finite differences.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

#include "reference.hpp"
#include "routed.hpp"

namespace {

using testing::ElementsAre;
using wherry::BalanceInput;
using wherry::RouterConfig;
using wherry::Score;

constexpr Score kScores[] = {Score::softmax, Score::sigmoid, Score::sqrtsoftplus,
                             Score::topk_softmax};

// 13 tokens over 6 experts with 3 choices, some of them none. Logits on a grid of 2^-10, so that a
// finite difference of 2^-10 moves them without rounding.
struct Batch {
  RouterConfig config{.experts = 6, .topk = 3};
  std::vector<float> logits;
  std::vector<std::int32_t> ids;
  static constexpr std::int64_t kTokens = 13;

  explicit Batch(Score score) {
    config.score = score;
    std::mt19937_64 engine(13);
    logits = reference::gaussian(kTokens * 6, 2.0, engine);
    for (float& x : logits) x = std::round(x * 1024.0F) / 1024.0F;
    ids = routed(config, {.tokens = kTokens, .logits = logits}).ids;
    ids[4] = ids[9] = ids[10] = ids[11] = -1;
  }
  [[nodiscard]] BalanceInput input(double coefficient) const {
    return {.tokens = kTokens, .logits = logits, .ids = ids, .coefficient = coefficient};
  }
};

using Loss = std::function<double(const Batch&, double coefficient, std::span<float> grad)>;

struct NamedLoss {
  const char* name;
  Loss loss;
};

const std::vector<std::int64_t> kSequences{0, 5, 5, 12, 13};  // the second one is empty
const std::vector<std::int64_t> kGlobalCounts{40, 3, 0, 22, 17, 9};
constexpr std::int64_t kGlobalTokens = 31;

const NamedLoss kLosses[] = {
    {"first-choice",
     [](const Batch& b, double c, std::span<float> grad) {
       return wherry::first_choice_loss(b.config, b.input(c), grad);
     }},
    {"top-k", [](const Batch& b, double c,
                 std::span<float> grad) { return wherry::topk_loss(b.config, b.input(c), grad); }},
    {"sequence-wise",
     [](const Batch& b, double c, std::span<float> grad) {
       return wherry::sequence_loss(b.config, b.input(c), kSequences, grad);
     }},
    {"global-batch",
     [](const Batch& b, double c, std::span<float> grad) {
       return wherry::global_batch_loss(b.config, b.input(c), kGlobalCounts, kGlobalTokens, grad);
     }},
    {"z", [](const Batch& b, double c,
             std::span<float> grad) { return wherry::z_loss(b.config, b.input(c), grad); }},
};

TEST(Losses, GradientsMatchFiniteDifferencesForEveryScore) {
  for (const NamedLoss& named : kLosses) {
    double worst = 0.0;
    double largest = 0.0;
    for (const Score score : kScores) {
      Batch batch(score);
      std::vector<float> grad(batch.logits.size(), 0.0F);
      named.loss(batch, 1.5, grad);
      for (std::size_t i = 0; i < grad.size(); ++i) {
        constexpr float kStep = 0x1p-10F;
        const float x = batch.logits[i];
        batch.logits[i] = x + kStep;
        const double above = named.loss(batch, 1.5, {});
        batch.logits[i] = x - kStep;
        const double below = named.loss(batch, 1.5, {});
        batch.logits[i] = x;
        const double difference = (above - below) / (2.0 * static_cast<double>(kStep));
        worst = std::max(worst, std::abs(static_cast<double>(grad[i]) - difference));
        largest = std::max(largest, std::abs(difference));
      }
    }
    std::printf("%s: gradients up to %.3g, at most %.2g from finite differences\n", named.name,
                largest, worst);
    EXPECT_GT(largest, 5e-3) << named.name << ": nothing to compare";
    EXPECT_LT(worst, 1e-6 * std::max(1.0, largest)) << named.name;
  }
}

TEST(Losses, GradientsAddToWhatIsThereAndScaleWithTheCoefficient) {
  for (const NamedLoss& named : kLosses) {
    const Batch batch(Score::sigmoid);
    std::vector<float> once(batch.logits.size(), 0.0F);
    std::vector<float> onto_one(batch.logits.size(), 1.0F);
    const double loss = named.loss(batch, 1.0, once);
    EXPECT_NEAR(named.loss(batch, 0.5, onto_one), 0.5 * loss, 1e-12) << named.name;
    for (std::size_t i = 0; i < once.size(); ++i) {
      EXPECT_NEAR(onto_one[i], 1.0F + 0.5F * once[i], 1e-6F) << named.name;
    }
  }
}

// E * sum_i f_i P_i over the tokens [begin, end), f_i = n_i / (choices * tokens).
double plain_balance(const Batch& b, std::size_t begin, std::size_t end, std::size_t choices) {
  std::vector<double> f(6, 0.0);
  for (std::size_t t = begin; t < end; ++t) {
    for (std::size_t k = 0; k < choices; ++k) {
      const int id = b.ids[3 * t + k];
      if (id >= 0)
        f[static_cast<std::size_t>(id)] += 1.0 / static_cast<double>((end - begin) * choices);
    }
  }
  const std::vector<double> p = reference::mean_probability(b.config, b.logits, begin, end);
  double sum = 0.0;
  for (std::size_t i = 0; i < 6; ++i) sum += f[i] * p[i];
  return 6.0 * sum;
}

TEST(Losses, ValuesEqualPlainSumsForEveryScore) {
  for (const Score score : kScores) {
    const Batch b(score);
    EXPECT_NEAR(wherry::first_choice_loss(b.config, b.input(1.0)), plain_balance(b, 0, 13, 1),
                1e-12);
    EXPECT_NEAR(wherry::topk_loss(b.config, b.input(0.25)), 0.25 * plain_balance(b, 0, 13, 3),
                1e-12);
    const double sequences =
        (plain_balance(b, 0, 5, 3) + plain_balance(b, 5, 12, 3) + plain_balance(b, 12, 13, 3)) /
        3.0;
    EXPECT_NEAR(wherry::sequence_loss(b.config, b.input(1.0), kSequences), sequences, 1e-12);
    double z = 0.0;
    for (std::size_t t = 0; t < 13; ++t) {
      double sum = 0.0;
      for (std::size_t i = 0; i < 6; ++i) sum += std::exp(static_cast<double>(b.logits[6 * t + i]));
      z += std::log(sum) * std::log(sum) / 13.0;
    }
    EXPECT_NEAR(wherry::z_loss(b.config, b.input(2.0)), 2.0 * z, 1e-12);
  }
}

TEST(Losses, RanksWithTheGlobalCountsAverageToTheLossOfTheWholeBatch) {
  for (const Score score : kScores) {
    const Batch b(score);
    std::vector<std::int64_t> counts(6);
    wherry::count_experts(b.config, std::span(b.ids).first(8 * 3), counts);
    wherry::count_experts(b.config, std::span(b.ids).subspan(8 * 3), counts);
    const std::span<const float> logits(b.logits);
    const double first = wherry::global_batch_loss(
        b.config, {.tokens = 8, .logits = logits.first(8 * 6)}, counts, 13);
    const double second = wherry::global_batch_loss(
        b.config, {.tokens = 5, .logits = logits.subspan(8 * 6)}, counts, 13);
    EXPECT_NEAR((8 * first + 5 * second) / 13, wherry::topk_loss(b.config, b.input(1.0)), 1e-12);
  }
}

TEST(Losses, APerfectBalanceCostsTheCoefficient) {
  // Token t prefers expert t by the same margin; K = 2, the second choice one further.
  for (const Score score : kScores) {
    const RouterConfig config{.experts = 8, .topk = 2, .score = score};
    std::vector<float> logits(64, -1.0F);
    std::vector<std::int32_t> ids;
    for (std::int32_t t = 0; t < 8; ++t) {
      logits[static_cast<std::size_t>(t) * 9] = 3.0F;
      ids.insert(ids.end(), {t, (t + 1) % 8});
    }
    const BalanceInput input{.tokens = 8, .logits = logits, .ids = ids, .coefficient = 1.0};
    BalanceInput small = input;
    small.coefficient = 0.01;
    EXPECT_NEAR(wherry::first_choice_loss(config, input), 1.0, 1e-12);
    EXPECT_NEAR(wherry::topk_loss(config, small), 0.01, 1e-14);
    EXPECT_NEAR(wherry::sequence_loss(config, small, std::vector<std::int64_t>{0, 8}), 0.01, 1e-14);
    const std::vector<std::int64_t> counts(8, 20);
    EXPECT_NEAR(wherry::global_batch_loss(config, small, counts, 80), 0.01, 1e-14);
  }
}

TEST(Losses, NoTokensCostNothing) {
  const RouterConfig config{.experts = 4, .topk = 2};
  const std::vector<std::int64_t> counts(4, 5);
  EXPECT_EQ(wherry::first_choice_loss(config, {}), 0.0);
  EXPECT_EQ(wherry::topk_loss(config, {}), 0.0);
  EXPECT_EQ(wherry::sequence_loss(config, {}, std::vector<std::int64_t>{0}), 0.0);
  EXPECT_EQ(wherry::global_batch_loss(config, {}, counts, 10), 0.0);
  EXPECT_EQ(wherry::z_loss(config, {}), 0.0);
}

TEST(Losses, ExtremeLogitsGiveFiniteGradients) {
  const std::vector<float> logits{-std::numeric_limits<float>::infinity(), 3e38F, -3e38F, 0.0F};
  const std::vector<std::int32_t> ids{1};
  for (const Score score : kScores) {
    const RouterConfig config{.experts = 4, .topk = 1, .score = score};
    std::vector<float> grad(4, 0.0F);
    const BalanceInput input{.tokens = 1, .logits = logits, .ids = ids};
    EXPECT_TRUE(std::isfinite(wherry::topk_loss(config, input, grad))) << name(score);
    for (const float g : grad) EXPECT_TRUE(std::isfinite(g)) << name(score);
  }
}

TEST(Bias, MovesByTheRateTowardsTheMeanAndStaysAtIt) {
  std::vector<float> bias{0.0F, 1.0F, -1.0F, 0.25F};
  wherry::update_bias(std::vector<std::int64_t>{10, 30, 20, 20}, 0.125F, bias);
  EXPECT_THAT(bias, ElementsAre(0.125F, 0.875F, -1.0F, 0.25F));
}

TEST(Bias, ComparesWithAMeanThatIsNoInteger) {
  std::vector<float> bias(3, 0.0F);
  wherry::update_bias(std::vector<std::int64_t>{3, 3, 4}, 0.5F, bias);
  EXPECT_THAT(bias, ElementsAre(0.5F, 0.5F, -0.5F));
}

TEST(Bias, IsExactForCountsThatFp64CannotHold) {
  constexpr std::int64_t kLarge = (std::int64_t{1} << 62) + 1;
  std::vector<float> bias(3, 0.0F);
  wherry::update_bias(std::vector<std::int64_t>{kLarge, kLarge, kLarge + 3}, 0.5F, bias);
  EXPECT_THAT(bias, ElementsAre(0.5F, 0.5F, -0.5F));
}

TEST(Bias, EvensOutARouterThatStartsSkewed) {
  const RouterConfig config{.experts = 8, .topk = 2, .score = Score::sigmoid, .bias = true};
  constexpr std::size_t kTokens = 512;
  std::mt19937_64 engine(17);
  std::vector<float> logits = reference::gaussian(kTokens * 8, 1.0, engine);
  for (std::size_t i = 0; i < logits.size(); ++i) logits[i] += i % 8 < 2 ? 2.0F : 0.0F;
  std::vector<float> bias(8, 0.0F);
  std::vector<std::int64_t> counts(8);
  const auto step = [&] {
    const Routed got = routed(config, {.tokens = kTokens, .logits = logits, .bias = bias});
    std::fill(counts.begin(), counts.end(), 0);
    wherry::count_experts(config, got.ids, counts);
  };
  step();
  EXPECT_GT(*std::max_element(counts.begin(), counts.end()), 300);  // the mean is 128
  for (int i = 0; i < 500; ++i) {
    wherry::update_bias(counts, 0.002F, bias);
    step();
  }
  EXPECT_LT(*std::max_element(counts.begin(), counts.end()), 141);
  EXPECT_GT(*std::min_element(counts.begin(), counts.end()), 115);
}

}  // namespace
