// The plain implementation: the shared suite, and the definition it follows bit by bit.
#include "experts/activation.hpp"
#include "unit/experts/cases.hpp"

namespace wherry::test {

INSTANTIATE_TEST_SUITE_P(Plain, GatedMlpTest,
                         ::testing::Values(Kind{"plain", DType::f32}, Kind{"plain", DType::bf16}),
                         kind_name);

namespace {

std::vector<float> product(const SyntheticExperts& experts, int expert, Matrix matrix,
                           const std::vector<float>& input) {
  std::vector<float> row(static_cast<std::size_t>(experts.cols(matrix))), result;
  for (std::int64_t r = 0; r < experts.rows(matrix); ++r) {
    experts.fill_row(expert, matrix, r, std::span(row));
    float sum = 0.0F;
    for (std::size_t c = 0; c < row.size(); ++c) sum += input[c] * row[c];
    result.push_back(sum);
  }
  return result;
}

TEST(PlainExperts, EqualTheTripleLoopBitForBit) {
  const SyntheticExperts experts{.seed = 12, .hidden = 203, .expert_hidden = 77};
  const std::vector<int> local = {6};
  const std::vector<std::int64_t> begin = {0}, counts = {9};
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const auto round = [&](float value) {
      return dtype == DType::bf16 ? bf16_to_float(float_to_bf16(value)) : value;
    };
    GatedMlp mlp({.hidden = 203, .expert_hidden = 77, .dtype = dtype, .implementation = "plain"},
                 local, experts.source());
    const Rows x(dtype, 9, 203), y(dtype, 9, 203);
    fill_synthetic_tokens(1, 0, x.view());
    mlp.forward(x.view(), begin, counts, y.view());
    for (std::int64_t r = 0; r < 9; ++r) {
      std::vector<float> input;
      input.reserve(203);
      for (std::int64_t c = 0; c < 203; ++c) input.push_back(x.at(r, c));
      std::vector<float> hidden = product(experts, 6, Matrix::gate, input);
      const std::vector<float> up = product(experts, 6, Matrix::up, input);
      for (std::size_t i = 0; i < hidden.size(); ++i) {
        hidden[i] = round(wherry::experts::silu_times(hidden[i], up[i]));
      }
      const std::vector<float> result = product(experts, 6, Matrix::down, hidden);
      for (std::int64_t c = 0; c < 203; ++c) {
        ASSERT_EQ(y.at(r, c), round(result[static_cast<std::size_t>(c)])) << r << ", " << c;
      }
    }
  }
}

TEST(PlainExperts, SiluIsAccurateEverywhereAndKeepsNan) {
  double worst = 0.0;
  for (int i = -8'700'000; i <= 8'700'000; i += 1237) {
    const double gate = i * 1e-5;
    const auto as_float = static_cast<float>(gate);
    const double exact =
        static_cast<double>(as_float) / (1.0 + std::exp(-static_cast<double>(as_float)));
    const auto got = static_cast<double>(wherry::experts::silu_times(as_float, 1.0F));
    if (exact != 0.0) worst = std::max(worst, std::abs(got - exact) / std::abs(exact));
  }
  EXPECT_LT(worst, 4e-7);
  EXPECT_EQ(wherry::experts::silu_times(0.0F, 5.0F), 0.0F);
  EXPECT_EQ(wherry::experts::silu_times(1e30F, 1.0F), 1e30F);
  EXPECT_NEAR(wherry::experts::silu_times(-1000.0F, 1.0F), 0.0F, 1e-30F);
  EXPECT_TRUE(std::isnan(wherry::experts::silu_times(NAN, 1.0F)));
  EXPECT_TRUE(std::isnan(wherry::experts::silu_times(1.0F, NAN)));
}

TEST(GatedMlp, RefusesConfigurationsWithASentence) {
  const auto code_of = [](const ExpertsConfig& config) {
    try {
      const GatedMlp mlp(config, {}, [](int, Matrix, TensorView) {});
    } catch (const Error& error) {
      return error.code();
    }
    return ErrorCode::internal;
  };
  EXPECT_EQ(code_of({.hidden = 0, .expert_hidden = 8}), ErrorCode::bad_argument);
  EXPECT_EQ(code_of({.hidden = 8, .expert_hidden = 0}), ErrorCode::bad_argument);
  EXPECT_EQ(code_of({.hidden = 8, .expert_hidden = 8, .num_threads = 0}), ErrorCode::bad_argument);
  EXPECT_EQ(code_of({.hidden = 8, .expert_hidden = 8, .implementation = "blas"}),
            ErrorCode::bad_argument);
  EXPECT_EQ(code_of({.hidden = 8, .expert_hidden = 8, .dtype = DType::f16}),
            ErrorCode::unsupported);
  EXPECT_EQ(
      code_of({.hidden = 8, .expert_hidden = 8, .dtype = DType::f32, .implementation = "onednn"}),
      ErrorCode::unsupported);
}

TEST(GatedMlp, ChoosesAnImplementationAndSaysWhy) {
  const std::vector<int> local = {0};
  const SyntheticExperts experts{.seed = 1, .hidden = 8, .expert_hidden = 8};
  const GatedMlp single({.hidden = 8, .expert_hidden = 8, .dtype = DType::f32}, local,
                        experts.source());
  EXPECT_EQ(single.implementation().name, "plain");
  EXPECT_THAT(single.implementation().reason, ::testing::HasSubstr("bf16 only"));
  const GatedMlp half({.hidden = 8, .expert_hidden = 8}, local, experts.source());
  EXPECT_THAT(half.implementation().reason, ::testing::HasSubstr("oneDNN"));
#if !WHERRY_HAS_CPU_EXPERTS
  EXPECT_EQ(half.implementation().name, "plain");
#endif
}

}  // namespace
}  // namespace wherry::test
