// route() against the fp64 reference, 100,000 random rows for each family of models.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <ostream>

#include "reference.hpp"
#include "routed.hpp"

namespace {

using wherry::RouterConfig;
using wherry::Score;

struct Family {
  const char* name;
  RouterConfig config;
  friend void PrintTo(const Family& family, std::ostream* out) { *out << family.name; }
};

const Family kFamilies[] = {
    {"Mixtral", {.experts = 8, .topk = 2}},
    {"Qwen3", {.experts = 128, .topk = 8}},
    {"Qwen3 without norm_topk_prob", {.experts = 128, .topk = 8, .normalize = false}},
    {"GptOss", {.experts = 128, .topk = 4, .score = Score::topk_softmax, .normalize = false}},
    {"Llama4",
     {.experts = 16,
      .topk = 1,
      .score = Score::sigmoid,
      .normalize = false,
      .weight_on_input = true}},
    {"DeepSeekV3",
     {.experts = 256,
      .topk = 8,
      .score = Score::sigmoid,
      .groups = 8,
      .groups_kept = 4,
      .bias = true,
      .scale = 2.5F}},
    {"KimiK2", {.experts = 384, .topk = 8, .score = Score::sigmoid, .bias = true, .scale = 2.827F}},
    {"Glm45", {.experts = 160, .topk = 8, .score = Score::sigmoid, .bias = true, .scale = 2.5F}},
    {"DeepSeekV4",
     {.experts = 256, .topk = 6, .score = Score::sqrtsoftplus, .bias = true, .scale = 1.5F}},
    {"Switch", {.experts = 64, .topk = 1, .normalize = false}},
    {"GShard", {.experts = 129, .topk = 2}},
    {"Softmax in groups", {.experts = 60, .topk = 6, .groups = 6, .groups_kept = 3, .bias = true}},
};

struct Tally {
  std::int64_t rows = 0, clear = 0, wrong = 0;
  double worst_ulp = 0.0;
};

// Compares one row; ids as sets, for inside the cut nearly equal scores may swap.
void compare(const Family& family, const reference::Row& want, std::span<const std::int32_t> ids,
             std::span<const float> weights, Tally& tally) {
  ++tally.rows;
  if (!want.clear) return;
  ++tally.clear;
  for (std::size_t k = 0; k < ids.size(); ++k) {
    const auto at = std::find(want.ids.begin(), want.ids.end(), ids[k]);
    if (at == want.ids.end()) {
      ++tally.wrong;
      ADD_FAILURE() << family.name << " row " << tally.rows - 1 << ": expert " << ids[k]
                    << " is not among the reference's";
      return;
    }
    const double weight = want.weights[static_cast<std::size_t>(at - want.ids.begin())];
    const double ulps =
        std::abs(static_cast<double>(weights[k]) - weight) / reference::ulp32(weight);
    tally.worst_ulp = std::max(tally.worst_ulp, ulps);
  }
}

class Families : public testing::TestWithParam<Family> {};

TEST_P(Families, MatchTheFp64ReferenceOnAHundredThousandRandomRows) {
  const Family& family = GetParam();
  const RouterConfig& config = family.config;
  const auto experts = static_cast<std::size_t>(config.experts);
  const auto topk = static_cast<std::size_t>(config.topk);
  constexpr std::size_t kRows = 1000;  // a call
  std::mt19937_64 engine(1);
  Tally tally;
  for (std::size_t call = 0; call < 100; ++call) {
    const double sigma = std::vector{0.1, 1.0, 3.0, 10.0}[call % 4];
    const std::vector<float> logits = reference::gaussian(kRows * experts, sigma, engine);
    const std::vector<float> bias = reference::gaussian(config.bias ? experts : 0, 0.1, engine);
    const Routed got = routed(config, {.tokens = kRows, .logits = logits, .bias = bias});
    for (std::size_t t = 0; t < kRows; ++t) {
      const auto row = std::span(logits).subspan(t * experts, experts);
      compare(family, reference::route(config, row, bias),
              std::span(got.ids).subspan(t * topk, topk),
              std::span(got.weights).subspan(t * topk, topk), tally);
    }
  }
  std::printf(
      "%s: %ld rows, %ld with a gap over 8 ulp at the cut, %ld of them with other ids, "
      "weights within %.2f ulp\n",
      family.name, tally.rows, tally.clear, tally.wrong, tally.worst_ulp);
  EXPECT_EQ(tally.wrong, 0);
  EXPECT_LE(tally.worst_ulp, 8.0);
  EXPECT_GE(tally.clear, tally.rows * 9 / 10) << "the comparison would mean little";
}

INSTANTIATE_TEST_SUITE_P(Router, Families, testing::ValuesIn(kFamilies),
                         [](const testing::TestParamInfo<Family>& family) {
                           std::string name = family.param.name;
                           std::erase(name, ' ');
                           std::erase(name, '_');
                           return name;
                         });

}  // namespace
