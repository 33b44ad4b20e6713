// The parts of the command line that need no ranks: synthetic routing, which tokens are verified,
// verification, percentiles, tables.
#include <gtest/gtest.h>

#include <numeric>
#include <set>

#include "layer/verify.hpp"
#include "report/bars.hpp"
#include "report/table.hpp"
#include "route/models.hpp"
#include "routing.hpp"
#include "stats.hpp"

namespace wherry::cli {
namespace {

std::vector<int> loads(double skew, std::uint64_t seed) {
  const auto routing =
      synthetic_routing({.skew = skew, .seed = seed}, {.experts = 16, .topk = 2}, 0, 4000);
  std::vector<int> counts(16);
  for (const std::int32_t id : routing.ids) ++counts[static_cast<std::size_t>(id)];
  std::ranges::sort(counts, std::greater());
  return counts;
}

TEST(SyntheticRouting, ChoosesDistinctExpertsWithWeightsThatSumToOne) {
  const auto routing =
      synthetic_routing({.skew = 2.0, .seed = 3}, {.experts = 9, .topk = 4}, 17, 1500);
  for (std::size_t t = 0; t < 1500; ++t) {
    const std::span ids = std::span(routing.ids).subspan(t * 4, 4);
    const std::span weights = std::span(routing.weights).subspan(t * 4, 4);
    EXPECT_EQ(std::set<int>(ids.begin(), ids.end()).size(), 4U);
    EXPECT_NEAR(std::accumulate(weights.begin(), weights.end(), 0.0), 1.0, 1e-6);
  }
}

TEST(SyntheticRouting, OfATokenDoesNotDependOnTheTokensBesideIt) {
  const auto all = synthetic_routing({}, {.experts = 8, .topk = 2}, 0, 2100);
  const auto part = synthetic_routing({}, {.experts = 8, .topk = 2}, 1500, 600);
  for (std::size_t i = 0; i < part.ids.size(); ++i) {
    ASSERT_EQ(part.ids[i], all.ids[3000 + i]);
    ASSERT_EQ(part.weights[i], all.weights[3000 + i]);
  }
}

TEST(SyntheticRouting, IsThatOfTheModel) {
  // Top-1 with the weight on the input: combine has no weights.
  const auto llama = synthetic_routing({}, router_config(find_model("llama4-scout")), 0, 10);
  EXPECT_EQ(llama.view().weights, nullptr);
  // 4 of 8 groups of 32: a token's experts lie in four of them; weights sum to the scale.
  const auto v3 = synthetic_routing({}, router_config(find_model("deepseek-v3")), 0, 200);
  for (std::size_t t = 0; t < 200; ++t) {
    std::set<int> groups;
    for (std::size_t k = 0; k < 8; ++k) groups.insert(v3.ids[t * 8 + k] / 32);
    EXPECT_LE(groups.size(), 4U);
    const std::span weights = std::span(v3.weights).subspan(t * 8, 8);
    EXPECT_NEAR(std::accumulate(weights.begin(), weights.end(), 0.0), 2.5, 1e-5);
  }
}

TEST(SyntheticRouting, IsEvenWithoutSkewAndFollowsZipfWithIt) {
  const std::vector<int> even = loads(0.0, 1);
  EXPECT_LT(even.front(), even.back() * 1.25);
  // The first choices follow 1/place exactly; the second, without the first, are flatter.
  const std::vector<int> skewed = loads(1.0, 1);
  EXPECT_GT(skewed.front(), 4 * skewed.back());
  EXPECT_NE(synthetic_routing({.seed = 1}, {.experts = 16, .topk = 2}, 0, 50).ids,
            synthetic_routing({.seed = 2}, {.experts = 16, .topk = 2}, 0, 50).ids);
}

TEST(TokensToVerify, AreAllBelowTheLimitAndElseSixtyFourWithFirstAndLast) {
  EXPECT_EQ(tokens_to_verify(4, 1, 5, 19e9), (std::vector<std::int64_t>{0, 1, 2, 3, 4}));
  for (const int ranks : {1, 3, 4, 64}) {
    std::size_t sum = 0;
    for (int rank = 0; rank < ranks; ++rank) {
      const auto chosen = tokens_to_verify(ranks, rank, 1000, 21e9);
      EXPECT_EQ(chosen.front(), 0);
      EXPECT_EQ(chosen.back(), 999);
      EXPECT_EQ(std::set(chosen.begin(), chosen.end()).size(), chosen.size());
      sum += chosen.size();
    }
    EXPECT_EQ(sum, ranks == 64 ? 128U : 64U) << ranks;
  }
  EXPECT_EQ(tokens_to_verify(64, 5, 1, 21e9), (std::vector<std::int64_t>{0}));
}

TEST(VerifyTokens, FindsOneWrongElementAndNamesIt) {
  // Of experts whose weights are 0 nothing comes: the result of no choice is exactly 0.
  constexpr std::int64_t kTokens = 5, kHidden = 6;
  std::vector<std::uint16_t> x(kTokens * kHidden, 0x3F80), y(kTokens * kHidden, 0);
  const std::vector<std::int32_t> ids(kTokens * 2, -1);
  const std::vector<float> weights(kTokens * 2, 0.5F);
  const Routing routing(ids.data(), weights.data(), kTokens, 2);
  const SyntheticExperts experts{.seed = 1, .hidden = kHidden, .expert_hidden = 4};
  const auto verify = [&] {
    return verify_tokens(experts, {0, 2, 4}, {x.data(), DType::bf16, kTokens, kHidden}, routing,
                         {y.data(), DType::bf16, kTokens, kHidden},
                         wire_format(Wire::same, DType::bf16, kHidden), 1);
  };
  EXPECT_TRUE(verify().passed);
  EXPECT_EQ(verify().tokens, 3);
  y[2 * kHidden + 3] = 0x3F80;
  EXPECT_FALSE(verify().passed);
  EXPECT_EQ(verify().worst_token, 2);
  EXPECT_EQ(verify().worst_column, 3);
  y[2 * kHidden + 3] = 0;
  y[3 * kHidden] = 0x3F80;  // not among the chosen
  EXPECT_TRUE(verify().passed);
}

TEST(Percentiles, AreSamplesThatWereMeasured) {
  std::vector<double> samples(200);
  std::iota(samples.rbegin(), samples.rend(), 1.0);
  EXPECT_EQ(percentiles(samples).p50, 100.0);
  EXPECT_EQ(percentiles(samples).p99, 198.0);
  EXPECT_EQ(percentiles({7.0}).p50, 7.0);
  EXPECT_EQ(percentiles({7.0}).p99, 7.0);
  EXPECT_EQ(percentiles({3.0, 1.0, 2.0}).p50, 2.0);
}

TEST(Table, AlignsColumnsAndKeepsUnitsReadable) {
  Table table({{"stage", Table::Align::left}, {"rows", Table::Align::right}});
  table.add({"plan"});
  table.add({"dispatch", count_text(1234567)});
  EXPECT_EQ(table.to_string(1),
            " stage          rows\n"
            " plan\n"
            " dispatch  1 234 567\n");
  EXPECT_EQ(count_text(-123456), "-123 456");
  EXPECT_EQ(bytes_text(999.0), "999 B");
  EXPECT_EQ(bytes_text(999.9e3), "1.00 MB");
  EXPECT_EQ(bytes_text(22.53e9), "22.5 GB");
  EXPECT_EQ(time_text(0.25), "250 ns");
  EXPECT_EQ(time_text(999.7), "1.00 ms");
  EXPECT_EQ(time_text(12345.0), "12.3 ms");
  EXPECT_EQ(time_text(2.5e6), "2.50 s");
}

TEST(Bars, AreAsHighAsTheirShareOfTheLargest) {
  EXPECT_EQ(bars_text(std::vector<std::int64_t>{0, 1, 4, 8}), " ▁▄█");
  EXPECT_EQ(bars_text(std::vector<std::int64_t>{1, 100, 3, 50}, 2), "█▄");
  EXPECT_EQ(bars_text(std::vector<std::int64_t>{0, 0}), "  ");
  EXPECT_EQ(bars_text({}), "");
}

}  // namespace
}  // namespace wherry::cli
