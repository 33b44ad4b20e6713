// The quotient that kernels use instead of a division is the division, wherever a code can show it.
#include "kernels/exact_quotient.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "kernels/numerics_low.hpp"

namespace wherry {
namespace {

class ExactQuotient : public testing::Test {
 protected:
  // Any mantissa, the exponents given.
  float drawn(int least, int most) {
    const auto exponent =
        static_cast<std::uint32_t>(std::uniform_int_distribution<int>(least, most)(random_) + 127);
    return bits_float((exponent << 23) | (static_cast<std::uint32_t>(random_()) & 0x7FFFFFU));
  }
  std::mt19937 random_{7};
};

void expect_same(float x, float divisor) {
  const Divisor d = divisor_of(divisor);
  ASSERT_TRUE(d.bounded) << divisor;
  for (const float value : {x, -x}) {
    ASSERT_EQ(float_bits(quotient_by(d, value)), float_bits(value / divisor))
        << value << " / " << divisor;
  }
}

TEST_F(ExactQuotient, OfAnyMantissasIsTheDivision) {
  for (int i = 0; i < 2'000'000; ++i) {
    const float divisor = drawn(-80, 109);
    expect_same(drawn(-20, 15) * divisor, divisor);
  }
}

TEST_F(ExactQuotient, BesideEveryTieIsTheDivision) {
  // Boundaries between codes of e4m3, e5m2, e2m1 and int8, and what is next to them.
  for (int i = 0; i < 200'000; ++i) {
    const float divisor = drawn(-80, 109);
    const float tie = std::ldexp(static_cast<float>(i % 512) / 2.0F, i % 18 - 12);
    const float x = tie * divisor;
    if (tie < 0x1p-20F || tie > 57344.0F) continue;
    expect_same(x, divisor);
    expect_same(std::nextafter(x, 0.0F), divisor);
    expect_same(std::nextafter(x, std::numeric_limits<float>::infinity()), divisor);
  }
}

TEST_F(ExactQuotient, OfWhatIsFarBelowTheDivisorIsTheSameCode) {
  for (int i = 0; i < 200'000; ++i) {
    const float divisor = drawn(-80, 109);
    const float x = drawn(-126, -20) * (i % 2 == 0 ? divisor : 1.0F);
    if (std::fabs(x / divisor) > 0x1p-17F) continue;
    const Divisor d = divisor_of(divisor);
    for (const float value : {x, -x, x * 0x1p-40F, 0.0F, -0.0F}) {
      const float quotient = quotient_by(d, value);
      ASSERT_EQ(float_to_low<E4M3>(quotient), float_to_low<E4M3>(value / divisor)) << value;
      ASSERT_EQ(float_to_low<E5M2>(quotient), float_to_low<E5M2>(value / divisor)) << value;
      ASSERT_EQ(float_to_low<E2M1>(quotient), float_to_low<E2M1>(value / divisor)) << value;
      ASSERT_EQ(float_to_int8(quotient), float_to_int8(value / divisor)) << value;
    }
  }
}

TEST_F(ExactQuotient, IsNotForDivisorsThatAnInfinityMakes) {
  EXPECT_TRUE(std::isnan(quotient_by(divisor_of(1.0F), std::nanf(""))));
  for (const float largest : {448.0F, 57344.0F, 127.0F, 2688.0F}) {
    EXPECT_FALSE(divisor_of(scale_of(kLargestBits, largest)).bounded) << largest;
  }
  EXPECT_FALSE(divisor_of(0.0F).bounded);
  EXPECT_FALSE(divisor_of(kSmallestFloat).bounded);
  EXPECT_FALSE(divisor_of(std::nanf("")).bounded);
}

// Every x of bf16 up to amax with a code other than zero; whatever reciprocal a device may make.
void expect_the_codes_of_divisions(std::uint32_t amax_bits, float raise, float divisor) {
  constexpr std::uint32_t kExponents = 19;  // 448 and half of 2^-9 are 2^18 apart
  const std::uint32_t first =
      amax_bits > kExponents << 7 ? amax_bits - (kExponents << 7) : std::uint32_t{0};
  const std::uint32_t exact = float_bits(1.0F / divisor);
  for (const std::uint32_t near : {exact - 1, exact, exact + 1}) {
    const SplitReciprocal by = split_reciprocal(divisor, bits_float(near));
    ASSERT_GT(by.low, 0.0F) << divisor;
    for (std::uint32_t bits = first; bits <= amax_bits; ++bits) {
      const float x = bits_float(bits << 16) * raise;
      ASSERT_EQ(float_to_low<E4M3>(near_quotient_by(by, x)), float_to_low<E4M3>(x / divisor))
          << x << " / " << divisor;
    }
    ASSERT_EQ(float_bits(near_quotient_by(by, -0.0F)), float_bits(-0.0F));
    ASSERT_TRUE(std::isnan(near_quotient_by(by, std::nanf(""))));
  }
}

TEST(Bf16AsE4m3, HasTheCodesAndScalesOfTheDivisions) {
  constexpr std::uint32_t kInfinity = 0x7F80;
  for (std::uint32_t bits = 1; bits < kInfinity; ++bits) {
    const float amax = bits_float(bits << 16);
    const float scale = amax / 448.0F;
    const bool small = amax < 0x1p-80F;  // rows that kernels raise first
    if (!small) {
      ASSERT_EQ(float_bits(e4m3_scale(amax)), float_bits(scale)) << amax;
    }
    const float raise = small ? 0x1p100F : 1.0F;
    ASSERT_NO_FATAL_FAILURE(expect_the_codes_of_divisions(bits, raise, scale * raise));
  }
  // A block with an infinity.
  expect_the_codes_of_divisions(kInfinity - 1, 1.0F, std::numeric_limits<float>::max() / 448.0F);
}

}  // namespace
}  // namespace wherry
