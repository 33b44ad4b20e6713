// Conversions between stored elements and sums: part of the numerics contract, so the same code runs
// on host and device. Every narrowing rounds once, to nearest even, overflows to infinity, flushes
// no subnormal and has one NaN (0x7FC0 in bf16, 0x7E00 in f16). Widening is exact and keeps the
// bits of a NaN. numerics_low.hpp has the formats of 8 bits and less.
#pragma once

#include <cstdint>

#include "kernels/layout.hpp"

namespace wherry {

[[nodiscard]] WHERRY_HD inline std::uint32_t float_bits(float value) noexcept {
  union {
    float as_float;
    std::uint32_t as_bits;
  } u{value};
  return u.as_bits;
}
[[nodiscard]] WHERRY_HD inline float bits_float(std::uint32_t bits) noexcept {
  union {
    std::uint32_t as_bits;
    float as_float;
  } u{bits};
  return u.as_float;
}

[[nodiscard]] WHERRY_HD inline float bf16_to_float(std::uint16_t value) noexcept {
  return bits_float(static_cast<std::uint32_t>(value) << 16);
}

[[nodiscard]] WHERRY_HD inline std::uint16_t float_to_bf16(float value) noexcept {
  const std::uint32_t bits = float_bits(value);
  if ((bits & 0x7FFFFFFFU) > 0x7F800000U) return 0x7FC0U;
  return static_cast<std::uint16_t>((bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16);
}

[[nodiscard]] WHERRY_HD inline float f16_to_float(std::uint16_t value) noexcept {
  const std::uint32_t sign = static_cast<std::uint32_t>(value & 0x8000U) << 16;
  const std::uint32_t magnitude = value & 0x7FFFU;
  if (magnitude >= 0x7C00U) return bits_float(sign | 0x7F800000U | ((magnitude & 0x3FFU) << 13));
  if (magnitude >= 0x0400U) return bits_float(sign | ((magnitude << 13) + 0x38000000U));
  // Subnormal: magnitude * 2^-24, exact in fp32.
  const float result = static_cast<float>(magnitude) * 5.9604644775390625e-8F;
  return sign != 0 ? -result : result;
}

[[nodiscard]] WHERRY_HD inline std::uint16_t float_to_f16(float value) noexcept {
  const std::uint32_t bits = float_bits(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000U;
  const std::uint32_t magnitude = bits & 0x7FFFFFFFU;
  if (magnitude > 0x7F800000U) return 0x7E00U;
  if (magnitude >= 0x477FF000U)
    return static_cast<std::uint16_t>(sign | 0x7C00U);                   // rounds to 2^16 or is inf
  if (magnitude < 0x33000001U) return static_cast<std::uint16_t>(sign);  // at most half of 2^-24
  const std::uint32_t exponent = magnitude >> 23;
  if (exponent >= 113U) {  // a normal half: drop 13 bits
    const std::uint32_t rounded = magnitude + 0x0FFFU + ((magnitude >> 13) & 1U);
    return static_cast<std::uint16_t>(sign | ((rounded - 0x38000000U) >> 13));
  }
  const std::uint32_t shift = 126U - exponent;  // 14..24: bits below 2^-24
  const std::uint32_t mantissa = (magnitude & 0x7FFFFFU) | 0x800000U;
  const std::uint32_t half = 1U << (shift - 1U);
  const std::uint32_t rounded = mantissa + half - 1U + ((mantissa >> shift) & 1U);
  return static_cast<std::uint16_t>(sign | (rounded >> shift));
}

// Rounded to odd: what is cut off leaves its trace in the last bit, so that a second rounding, to
// fewer than 22 bits, gives what a single one would. NaN gives the canonical NaN.
[[nodiscard]] WHERRY_HD inline float double_to_float_odd(double value) noexcept {
  if (value != value) return bits_float(0x7FC00000U);
  const float nearest = static_cast<float>(value);
  const double back = static_cast<double>(nearest);
  if (back == value) return nearest;
  const bool too_far = value < 0 ? back < value : back > value;
  return bits_float((float_bits(nearest) - (too_far ? 1U : 0U)) | 1U);
}

[[nodiscard]] WHERRY_HD inline std::uint16_t double_to_bf16(double value) noexcept {
  return float_to_bf16(double_to_float_odd(value));
}

[[nodiscard]] WHERRY_HD inline std::uint16_t double_to_f16(double value) noexcept {
  return float_to_f16(double_to_float_odd(value));
}

}  // namespace wherry
