// The 16-bit conversions at every place where a rounding could go wrong: each code, and each
// boundary between two neighbouring codes with the nearest values on both of its sides.
#include "kernels/numerics.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>

namespace {

using namespace wherry;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// A 16-bit format and its conversions, so that one test covers both.
struct Bf16 {
  static constexpr std::uint16_t kInfinityCode = 0x7F80, kNan = 0x7FC0;
  static float widen(std::uint16_t code) { return bf16_to_float(code); }
  static std::uint16_t narrow(float value) { return float_to_bf16(value); }
  static std::uint16_t narrow(double value) { return double_to_bf16(value); }
  static constexpr int kMantissa = 7, kMinExponent = -126;
};
struct F16 {
  static constexpr std::uint16_t kInfinityCode = 0x7C00, kNan = 0x7E00;
  static float widen(std::uint16_t code) { return f16_to_float(code); }
  static std::uint16_t narrow(float value) { return float_to_f16(value); }
  static std::uint16_t narrow(double value) { return double_to_f16(value); }
  static constexpr int kMantissa = 10, kMinExponent = -14;
};

template <typename Format>
class Numerics : public testing::Test {
 protected:
  // The value of a code that is not a NaN by the definition of the format, in double; for the code
  // of infinity the power of two that would come next.
  static double value_of(std::uint16_t code) {
    const int exponent = (code & 0x7FFF) >> Format::kMantissa;
    const int mantissa = code & ((1 << Format::kMantissa) - 1);
    const int implicit = exponent == 0 ? 0 : 1 << Format::kMantissa;
    const double magnitude = std::ldexp(
        implicit + mantissa, Format::kMinExponent - Format::kMantissa + std::max(exponent - 1, 0));
    return (code & 0x8000) != 0 ? -magnitude : magnitude;
  }
};
struct FormatNames {
  template <typename Format>
  static std::string GetName(int) {
    return Format::kMantissa == 7 ? "Bf16" : "F16";
  }
};
using Formats = testing::Types<Bf16, F16>;
TYPED_TEST_SUITE(Numerics, Formats, FormatNames);

TYPED_TEST(Numerics, EveryCodeWidensToTheValueOfItsDefinitionAndComesBack) {
  for (unsigned i = 0; i <= 0xFFFF; ++i) {
    const auto code = static_cast<std::uint16_t>(i);
    const float value = TypeParam::widen(code);
    if ((code & 0x7FFF) > TypeParam::kInfinityCode) {
      ASSERT_TRUE(std::isnan(value)) << std::hex << code;
      ASSERT_EQ(TypeParam::narrow(value), TypeParam::kNan) << std::hex << code;
      continue;
    }
    const bool infinite = (code & 0x7FFF) == TypeParam::kInfinityCode;
    const double want =
        infinite ? std::copysign(HUGE_VAL, this->value_of(code)) : this->value_of(code);
    ASSERT_EQ(static_cast<double>(value), want) << std::hex << code;
    ASSERT_EQ(std::signbit(value), (code & 0x8000) != 0) << std::hex << code;
    ASSERT_EQ(TypeParam::narrow(value), code) << std::hex << code;
    ASSERT_EQ(TypeParam::narrow(static_cast<double>(value)), code) << std::hex << code;
  }
}

TYPED_TEST(Numerics, EveryBoundaryBetweenTwoCodesRoundsToTheEvenOneAndNothingElseDoes) {
  for (unsigned i = 0; i < TypeParam::kInfinityCode; ++i) {
    for (const unsigned sign : {0U, 0x8000U}) {
      const auto below = static_cast<std::uint16_t>(i | sign);
      const auto above = static_cast<std::uint16_t>((i + 1) | sign);
      const std::uint16_t even = (i & 1U) == 0 ? below : above;
      const double half = (this->value_of(below) + this->value_of(above)) / 2;
      const double away = std::copysign(HUGE_VAL, half);
      ASSERT_EQ(TypeParam::narrow(half), even) << std::hex << below;
      ASSERT_EQ(TypeParam::narrow(std::nextafter(half, 0.0)), below) << std::hex << below;
      ASSERT_EQ(TypeParam::narrow(std::nextafter(half, away)), above) << std::hex << below;
      const auto single = static_cast<float>(half);
      if (static_cast<double>(single) != half) continue;  // only below the subnormals of fp32
      ASSERT_EQ(TypeParam::narrow(single), even) << std::hex << below;
      ASSERT_EQ(TypeParam::narrow(std::nextafter(single, 0.0F)), below) << std::hex << below;
      ASSERT_EQ(TypeParam::narrow(std::nextafter(single, static_cast<float>(away))), above)
          << std::hex << below;
    }
  }
}

// Distance to the code chosen is at most that to its neighbours, over fp32 at a prime stride.
TYPED_TEST(Numerics, ASweepOfAllFp32GoesToTheNearestCode) {
  for (std::uint64_t bits = 0; bits < 0x7F800000U; bits += 997) {
    const float value = bits_float(static_cast<std::uint32_t>(bits));
    const std::uint16_t code = TypeParam::narrow(value);
    ASSERT_EQ(TypeParam::narrow(-value), code | 0x8000) << bits;
    ASSERT_EQ(TypeParam::narrow(static_cast<double>(value)), code) << bits;
    ASSERT_LE(code, TypeParam::kInfinityCode) << bits;
    const double exact = value;
    const double error = std::abs(this->value_of(code) - exact);
    if (code > 0) {
      ASSERT_LE(error, std::abs(this->value_of(static_cast<std::uint16_t>(code - 1)) - exact))
          << bits;
    }
    if (code < TypeParam::kInfinityCode) {
      ASSERT_LE(error, std::abs(this->value_of(static_cast<std::uint16_t>(code + 1)) - exact))
          << bits;
    }
  }
}

TYPED_TEST(Numerics, EveryNanBecomesTheOneNan) {
  for (const std::uint32_t bits : {0x7F800001U, 0x7FBFFFFFU, 0x7FC00000U, 0x7FFFFFFFU}) {
    EXPECT_EQ(TypeParam::narrow(bits_float(bits)), TypeParam::kNan) << std::hex << bits;
    EXPECT_EQ(TypeParam::narrow(bits_float(bits | 0x80000000U)), TypeParam::kNan)
        << std::hex << bits;
  }
  EXPECT_EQ(TypeParam::narrow(std::nan("")), TypeParam::kNan);
  EXPECT_EQ(TypeParam::narrow(-std::nan("")), TypeParam::kNan);
}

TYPED_TEST(Numerics, WhatIsTooLargeBecomesInfinity) {
  EXPECT_EQ(TypeParam::narrow(std::numeric_limits<float>::max()), TypeParam::kInfinityCode);
  EXPECT_EQ(TypeParam::narrow(std::numeric_limits<double>::max()), TypeParam::kInfinityCode);
  EXPECT_EQ(TypeParam::narrow(-kInfinity), TypeParam::kInfinityCode | 0x8000);
}

TEST(NumericsDouble, AValueJustBesideAnFp32TieIsNotRoundedTwice) {
  // Nearest fp32 of 1 + 2^-8 + 2^-40 is the tie 1 + 2^-8 of bf16, which would go down to even.
  EXPECT_EQ(double_to_bf16(1 + 0x1p-8 + 0x1p-40), 0x3F81);
  EXPECT_EQ(double_to_bf16(1 + 0x1p-8), 0x3F80);
  EXPECT_EQ(double_to_f16(1 + 0x1p-11 + 0x1p-40), 0x3C01);
  EXPECT_EQ(double_to_f16(5e-324), 0x0000);
  EXPECT_EQ(double_to_f16(-5e-324), 0x8000);
}

}  // namespace
