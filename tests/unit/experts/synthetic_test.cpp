// Synthetic weights and tokens: the same everywhere, exact in bf16, of the right size, all different.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <set>
#include <vector>

#include "experts/synthetic.hpp"
#include "kernels/numerics.hpp"

namespace wherry::test {
namespace {

std::vector<float> row(const SyntheticExperts& experts, int expert, Matrix matrix, std::int64_t r) {
  std::vector<float> values(static_cast<std::size_t>(experts.cols(matrix)));
  experts.fill_row(expert, matrix, r, std::span(values));
  return values;
}

TEST(Synthetic, AreTheSameBitsOnEveryMachine) {
  const SyntheticExperts experts{.seed = 1, .hidden = 8, .expert_hidden = 4};
  const float unit = experts.bound(Matrix::up) / 255.0F;  // a power of two: divisions are exact
  std::vector<int> units;
  for (const float value : row(experts, 3, Matrix::up, 2)) {
    units.push_back(static_cast<int>(value / unit));
  }
  EXPECT_THAT(units, ::testing::ElementsAre(99, -185, 83, -95, -161, 81, 101, -43));
  std::vector<float> token(8);
  TensorView view;
  view.data = token.data();
  view.dtype = DType::f32;
  view.rows = 1;
  view.cols = 8;
  fill_synthetic_tokens(1, 5, view);
  std::vector<int> token_units;
  token_units.reserve(token.size());
  for (const float value : token) token_units.push_back(static_cast<int>(value * 128.0F));
  EXPECT_THAT(token_units, ::testing::ElementsAre(43, 231, -99, 41, 111, 65, -39, -183));
}

TEST(Synthetic, Bf16AndFp32HoldTheSameValues) {
  const SyntheticExperts experts{.seed = 2, .hidden = 100, .expert_hidden = 37};
  for (const Matrix matrix : {Matrix::gate, Matrix::up, Matrix::down}) {
    std::vector<std::uint16_t> half(static_cast<std::size_t>(experts.cols(matrix)));
    experts.fill_row(5, matrix, 7, std::span(half));
    const std::vector<float> single = row(experts, 5, matrix, 7);
    for (std::size_t c = 0; c < half.size(); ++c) {
      EXPECT_EQ(bf16_to_float(half[c]), single[c]);
      EXPECT_NE(single[c], 0.0F);
    }
  }
}

TEST(Synthetic, AreUniformWithinTheBoundAndOfUnitGain) {
  for (const std::int64_t fan_in : {2, 6, 7, 96, 2048, 6144, 7168}) {
    const SyntheticExperts experts{.seed = 3, .hidden = fan_in, .expert_hidden = 64};
    double sum = 0.0, squares = 0.0, largest = 0.0, count = 0.0;
    for (std::int64_t r = 0; count < 20'000; ++r) {
      for (const float value : row(experts, 1, Matrix::gate, r)) {
        const auto v = static_cast<double>(value);
        sum += v;
        squares += v * v;
        largest = std::max(largest, std::abs(v));
        ++count;
      }
    }
    const auto bound = static_cast<double>(experts.bound(Matrix::gate));
    EXPECT_EQ(largest, bound);
    EXPECT_NEAR(squares / count, bound * bound / 3.0, 0.03 * bound * bound);
    EXPECT_NEAR(sum / count, 0.0, 0.03 * bound);
    const double gain = squares / count * static_cast<double>(fan_in);
    EXPECT_GT(gain, 0.45);
    EXPECT_LT(gain, 2.2);
  }
}

TEST(Synthetic, NoTwoRowsExpertsMatricesOrSeedsAreAlike) {
  std::set<std::vector<float>> rows;
  std::size_t made = 0;
  for (const std::uint64_t seed : {1U, 2U}) {
    const SyntheticExperts experts{.seed = seed, .hidden = 16, .expert_hidden = 16};
    for (int expert = 0; expert < 8; ++expert) {
      for (const Matrix matrix : {Matrix::gate, Matrix::up, Matrix::down}) {
        for (std::int64_t r = 0; r < 16; ++r, ++made) rows.insert(row(experts, expert, matrix, r));
      }
    }
  }
  EXPECT_EQ(rows.size(), made);
}

TEST(Synthetic, TokensDependOnSeedAndGlobalIndexAlone) {
  std::vector<float> many(10 * 33), two(2 * 33);
  TensorView view;
  view.data = many.data();
  view.dtype = DType::f32;
  view.rows = 10;
  view.cols = 33;
  fill_synthetic_tokens(4, 20, view);
  view.data = two.data();
  view.rows = 2;
  fill_synthetic_tokens(4, 27, view);
  EXPECT_TRUE(std::equal(two.begin(), two.end(), many.begin() + 7 * 33));
  fill_synthetic_tokens(5, 27, view);
  EXPECT_FALSE(std::equal(two.begin(), two.end(), many.begin() + 7 * 33));
}

}  // namespace
}  // namespace wherry::test
