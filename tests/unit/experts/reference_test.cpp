// The dense reference and the tolerance: right where the oracle is, and wrong where a layer is.
#include <numeric>

#include "experts/reference.hpp"
#include "unit/experts/cases.hpp"

namespace wherry::test {
namespace {

struct Layer {
  SyntheticExperts experts;
  std::int64_t tokens;
  int topk;
  std::vector<std::int32_t> ids;
  std::vector<float> weights;
  [[nodiscard]] Routing routing() const { return {ids.data(), weights.data(), tokens, topk}; }
};

Layer make_layer(std::int64_t hidden, std::int64_t expert_hidden) {
  Layer layer{.experts = {.seed = 5, .hidden = hidden, .expert_hidden = expert_hidden},
              .tokens = 13,
              .topk = 4,
              .ids = {},
              .weights = {}};
  std::mt19937 random(3);
  for (std::int64_t i = 0; i < layer.tokens * layer.topk; ++i) {
    layer.ids.push_back(static_cast<std::int32_t>(random() % 8) - 1);  // -1, and repeats
    layer.weights.push_back(static_cast<float>(random() % 100) / 60.0F - 0.4F);
  }
  for (std::size_t k = 0; k < 4; ++k) {
    layer.ids[k] = -1;                                 // token 0 has no expert
    layer.ids[20 + k] = static_cast<std::int32_t>(k);  // token 5 has four that matter
    layer.weights[20 + k] = 0.25F * static_cast<float>(k + 1);
  }
  return layer;
}

std::vector<double> oracle_token(const Layer& layer, const Rows& x, std::int64_t token) {
  std::vector<double> input, sum(static_cast<std::size_t>(layer.experts.hidden));
  for (std::int64_t c = 0; c < layer.experts.hidden; ++c) {
    input.push_back(static_cast<double>(x.at(token, c)));
  }
  for (int k = 0; k < layer.topk; ++k) {
    const auto at = static_cast<std::size_t>(token * layer.topk + k);
    if (layer.ids[at] < 0) continue;
    const std::vector<double> y = mlp_oracle(layer.experts, layer.ids[at], input);
    for (std::size_t c = 0; c < y.size(); ++c) {
      sum[c] += static_cast<double>(layer.weights[at]) * y[c];
    }
  }
  return sum;
}

// The result of a layer that rounds only at the end.
void write_layer(const Expected& expected, const Rows& y) {
  for (std::int64_t t = 0; t < expected.tokens; ++t) {
    for (std::int64_t c = 0; c < expected.hidden; ++c) {
      const auto value =
          static_cast<float>(expected.y[static_cast<std::size_t>(t * expected.hidden + c)]);
      if (y.view().dtype == DType::f32) {
        y.view().row<float>(t)[c] = value;
      } else {
        y.view().row<std::uint16_t>(t)[c] = float_to_bf16(value);
      }
    }
  }
}

TEST(Reference, EqualsTheOracleForAnyNumberOfThreads) {
  const Layer layer = make_layer(83, 45);
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const Rows x(dtype, layer.tokens, 83, 4);
    fill_synthetic_tokens(1, 0, x.view());
    for (const int num_threads : {1, 3}) {
      const Expected expected =
          dense_reference(layer.experts, x.view(), layer.routing(), num_threads);
      for (std::int64_t t = 0; t < layer.tokens; ++t) {
        const std::vector<double> oracle = oracle_token(layer, x, t);
        for (std::int64_t c = 0; c < 83; ++c) {
          ASSERT_NEAR(expected.y[static_cast<std::size_t>(t * 83 + c)],
                      oracle[static_cast<std::size_t>(c)], 1e-5)
              << "token " << t << ", column " << c;
        }
      }
    }
  }
}

TEST(Reference, ScaleIsTheRmsOfTheResult) {
  const Layer layer = make_layer(512, 256);
  const Rows x(DType::bf16, layer.tokens, 512);
  fill_synthetic_tokens(1, 0, x.view());
  const Expected expected = dense_reference(layer.experts, x.view(), layer.routing());
  double ratio = 0.0;
  for (std::int64_t t = 1; t < layer.tokens; ++t) {
    const double* const y = expected.y.data() + t * 512;
    ratio += std::sqrt(std::inner_product(y, y + 512, y, 0.0) / 512) /
             expected.scale[static_cast<std::size_t>(t)] / static_cast<double>(layer.tokens - 1);
  }
  EXPECT_GT(ratio, 0.85);  // experts that come twice add up instead of averaging out
  EXPECT_LT(ratio, 1.25);
}

TEST(Compare, PassesRoundedResultsAndNoticesEveryKindOfMistake) {
  const Layer layer = make_layer(256, 64);
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const Rows x(dtype, layer.tokens, 256), y(dtype, layer.tokens, 256);
    fill_synthetic_tokens(1, 0, x.view());
    const Expected expected = dense_reference(layer.experts, x.view(), layer.routing());
    write_layer(expected, y);
    const Comparison right = compare(layer.experts, expected, y.view());
    EXPECT_TRUE(right.passed);
    EXPECT_LE(right.max_error, right.tolerance / 3);

    const auto fails = [&](const Layer& wrong, const char* what) {
      write_layer(dense_reference(wrong.experts, x.view(), wrong.routing()), y);
      const Comparison c = compare(layer.experts, expected, y.view());
      EXPECT_FALSE(c.passed) << what << ": error " << c.max_error;
    };
    Layer wrong = layer;
    wrong.ids[20] = 6;
    fails(wrong, "another expert");
    wrong = layer;
    wrong.ids[21] = -1;
    fails(wrong, "a choice lost");
    wrong = layer;
    std::swap(wrong.weights[20], wrong.weights[21]);
    fails(wrong, "weights swapped");
    wrong = layer;
    wrong.weights[23] *= 1.25F;
    fails(wrong, "a weight too large");
  }
}

TEST(Compare, NoticesANanAndAnythingButZeroForATokenWithoutExpert) {
  const Layer layer = make_layer(32, 16);
  const Rows x(DType::f32, layer.tokens, 32), y(DType::f32, layer.tokens, 32);
  fill_synthetic_tokens(1, 0, x.view());
  const Expected expected = dense_reference(layer.experts, x.view(), layer.routing());
  write_layer(expected, y);
  ASSERT_TRUE(compare(layer.experts, expected, y.view()).passed);
  y.view().row<float>(0)[3] = 1e-20F;
  const Comparison nonzero = compare(layer.experts, expected, y.view());
  EXPECT_FALSE(nonzero.passed);
  EXPECT_EQ(nonzero.worst_token, 0);
  write_layer(expected, y);
  y.view().row<float>(2)[7] = NAN;
  const Comparison nan = compare(layer.experts, expected, y.view());
  EXPECT_FALSE(nan.passed);
  EXPECT_EQ(nan.worst_token, 2);
  EXPECT_EQ(nan.worst_column, 7);
}

}  // namespace
}  // namespace wherry::test
