// The encodings of 8 bits and less: every code, and every boundary between two codes with the
// nearest fp32 values on both of its sides. (oracle/ compares the same with ml_dtypes.)
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>

#include "kernels/numerics_low.hpp"

namespace wherry {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLargest = std::numeric_limits<float>::max();

template <typename Format>
class LowFloat : public testing::Test {
 protected:
  static constexpr unsigned kSign = 1U << Format::kSignBit;

  // The value of a code without sign, by the definition of a float.
  static double value_of(unsigned code) {
    const int exponent = static_cast<int>(code >> Format::kMantissa);
    const int mantissa = static_cast<int>(code & ((1U << Format::kMantissa) - 1U));
    const int whole = exponent == 0 ? mantissa : mantissa + (1 << Format::kMantissa);
    return std::ldexp(whole, std::max(exponent, 1) - Format::kBias - Format::kMantissa);
  }
};
struct FormatNames {
  template <typename Format>
  static std::string GetName(int) {
    return "E" + std::to_string(Format::kSignBit - Format::kMantissa) + "M" +
           std::to_string(Format::kMantissa);
  }
};
using Formats = testing::Types<E4M3, E5M2, E2M1>;
TYPED_TEST_SUITE(LowFloat, Formats, FormatNames);

TYPED_TEST(LowFloat, EveryFiniteCodeHasTheValueOfItsDefinitionAndComesBack) {
  for (unsigned code = 0; code <= TypeParam::kLargestCode; ++code) {
    for (const unsigned sign : {0U, this->kSign}) {
      const float value = low_to_float<TypeParam>(code | sign);
      const double want = sign != 0 ? -this->value_of(code) : this->value_of(code);
      ASSERT_EQ(static_cast<double>(value), want) << code;
      ASSERT_EQ(std::signbit(value), sign != 0) << code;
      ASSERT_EQ(float_to_low<TypeParam>(value), code | sign) << code;
    }
  }
}

TYPED_TEST(LowFloat, EveryBoundaryBetweenTwoCodesRoundsToTheEvenOneAndNothingElseDoes) {
  for (unsigned code = 0; code < TypeParam::kLargestCode; ++code) {
    for (const unsigned sign : {0U, this->kSign}) {
      const double middle = (this->value_of(code) + this->value_of(code + 1)) / 2;
      const auto half = static_cast<float>(sign != 0 ? -middle : middle);
      const unsigned even = code % 2 == 0 ? code : code + 1;
      ASSERT_EQ(float_to_low<TypeParam>(half), even | sign) << code;
      ASSERT_EQ(float_to_low<TypeParam>(std::nextafter(half, 0.0F)), code | sign) << code;
      ASSERT_EQ(float_to_low<TypeParam>(std::nextafter(half, half * 2)), (code + 1) | sign) << code;
    }
  }
}

TYPED_TEST(LowFloat, WhatIsTooLargeSaturatesInfinityToo) {
  for (const float value : {TypeParam::kMax, std::nextafter(TypeParam::kMax, kInfinity),
                            TypeParam::kMax * 2, kLargest, kInfinity}) {
    EXPECT_EQ(float_to_low<TypeParam>(value), TypeParam::kLargestCode) << value;
    EXPECT_EQ(float_to_low<TypeParam>(-value), TypeParam::kLargestCode | this->kSign) << value;
  }
}

TYPED_TEST(LowFloat, WhatIsTooSmallBecomesASignedZero) {
  for (const float value :
       {0.0F, 1e-45F, std::numeric_limits<float>::min(), TypeParam::kStep / 2}) {
    EXPECT_EQ(float_to_low<TypeParam>(value), 0U) << value;
    EXPECT_EQ(float_to_low<TypeParam>(-value), this->kSign) << value;
  }
}

TYPED_TEST(LowFloat, EveryNanBecomesTheOneNan) {
  for (const std::uint32_t bits :
       {0x7F800001U, 0x7FC00000U, 0x7FFFFFFFU, 0xFF800001U, 0xFFFFFFFFU}) {
    EXPECT_EQ(float_to_low<TypeParam>(bits_float(bits)), TypeParam::kNanCode) << bits;
  }
  if (TypeParam::kNanCode == TypeParam::kLargestCode) return;  // e2m1 has none
  EXPECT_EQ(float_bits(low_to_float<TypeParam>(TypeParam::kNanCode)), 0x7FC00000U);
}

TEST(LowFloat, InfinitiesOfE5m2AreRead) {
  EXPECT_EQ(low_to_float<E5M2>(0x7C), kInfinity);
  EXPECT_EQ(low_to_float<E5M2>(0xFC), -kInfinity);
  for (const unsigned nan : {0x7DU, 0x7EU, 0x7FU, 0xFDU}) {
    EXPECT_TRUE(std::isnan(low_to_float<E5M2>(nan))) << nan;
  }
}

TEST(Int8, RoundsTiesToEvenAndClampsTo127) {
  for (int i = -127; i < 127; ++i) {
    const float half = static_cast<float>(i) + 0.5F;
    EXPECT_EQ(float_to_int8(static_cast<float>(i)), i);
    EXPECT_EQ(float_to_int8(half), i % 2 == 0 ? i : i + 1) << half;
    EXPECT_EQ(float_to_int8(std::nextafter(half, -kInfinity)), i) << half;
    EXPECT_EQ(float_to_int8(std::nextafter(half, kInfinity)), i + 1) << half;
  }
  for (const float value : {127.0F, 127.5F, 128.0F, 1e9F, kInfinity}) {
    EXPECT_EQ(float_to_int8(value), 127) << value;
    EXPECT_EQ(float_to_int8(-value), -127) << value;
  }
  EXPECT_EQ(float_to_int8(-0.0F), 0);
}

TEST(E8m0, ScaleBytesOfTheFactsPage) {
  const auto byte = [](float amax) {
    return block_scale<E4M3, ScaleRule::mx>(magnitude_bits(amax)).exponent;
  };
  EXPECT_EQ(byte(448.0F), 127);
  EXPECT_EQ(byte(224.0F), 126);
  EXPECT_EQ(byte(std::nextafter(448.0F, kInfinity)), 128);
  EXPECT_EQ(byte(1.0F), 119);
  EXPECT_EQ(byte(1.75F), 119);
  EXPECT_EQ(byte(3.0F), 120);
  EXPECT_EQ(byte(3.5F), 120);
  EXPECT_EQ(byte(6.0F), 121);
  EXPECT_EQ(byte(7.0F), 121);
  EXPECT_EQ(byte(kLargest), 247);
  EXPECT_EQ(byte(std::numeric_limits<float>::quiet_NaN()), 255);
  EXPECT_EQ(byte(kInfinity), 254);
  EXPECT_EQ(byte(0.0F), 0);
}

TEST(E8m0, EveryByteIsItsPowerOfTwoAndComesBack) {
  for (unsigned code = 0; code < 255; ++code) {
    const float value = e8m0_to_float(code);
    ASSERT_EQ(static_cast<double>(value), std::ldexp(1.0, static_cast<int>(code) - 127)) << code;
    ASSERT_EQ(float_to_e8m0_up(value), code);
    ASSERT_EQ(static_cast<double>(e8m0_reciprocal(code)) * static_cast<double>(value), 1.0) << code;
    const unsigned above = std::min(code + 1, 254U);
    ASSERT_EQ(float_to_e8m0_up(std::nextafter(value, kInfinity)), above) << code;
  }
  EXPECT_TRUE(std::isnan(e8m0_to_float(255)));
  EXPECT_TRUE(std::isnan(e8m0_reciprocal(255)));
}

// What "smallest" means: one step smaller is too small, and this one is not.
template <typename Format>
void expect_smallest(float amax) {
  const std::uint8_t code = scale_of_pow2<Format>(magnitude_bits(amax));
  const double scale = e8m0_to_float(code);
  ASSERT_GE(scale * Format::kMax, static_cast<double>(amax)) << amax;
  if (code > 0) {
    ASSERT_LT(scale / 2 * Format::kMax, static_cast<double>(amax)) << amax;
  }
}

TEST(E8m0, ThePowerOfTwoScaleIsTheSmallestThatDoesNotClip) {
  for (std::uint32_t bits = 1; bits < kInfinityBits; bits += 99'991) {
    expect_smallest<E4M3>(bits_float(bits));
    expect_smallest<E5M2>(bits_float(bits));
  }
  for (int exponent = -130; exponent <= 119; ++exponent) {
    for (const float start : {448.0F, 57344.0F}) {
      const float tight = std::ldexp(start, exponent - 8);
      for (const float amax :
           {std::nextafter(tight, 0.0F), tight, std::nextafter(tight, kInfinity)}) {
        expect_smallest<E4M3>(amax);
        expect_smallest<E5M2>(amax);
      }
    }
  }
}

}  // namespace
}  // namespace wherry
