// Number formats of 8 bits and less, and the scales of their blocks: part of the numerics contract,
// so the same code runs on host and device. Encodings round once, to nearest even, after clamping
// to the largest finite value (infinity too); NaN stays NaN where the format has one. They need the
// default rounding mode and no flush to zero.
#pragma once

#include <cstdint>

#include "kernels/numerics.hpp"

namespace wherry {

inline constexpr std::uint32_t kInfinityBits = 0x7F800000U;
inline constexpr std::uint32_t kLargestBits = 0x7F7FFFFFU;  // of the largest finite fp32
inline constexpr float kSmallestFloat = 1.40129846e-45F;    // 2^-149

// ---- Elements ----------------------------------------------------------------------------------
// kShift: a float whose unit in the last place is the format's smallest step, so that adding it
// rounds a subnormal. kLargestCode, kNanCode: without the sign.

struct E4M3 {
  static constexpr int kMantissa = 3, kBias = 7, kSignBit = 7;
  static constexpr std::uint32_t kMinNormalBits = 0x3C800000U;  // 2^-6
  static constexpr std::uint32_t kMaxBits = 0x43E00000U;        // 448
  static constexpr std::uint32_t kLargestCode = 0x7E, kNanCode = 0x7F;
  static constexpr float kShift = 16384.0F, kStep = 0.001953125F, kMax = 448.0F;
  static constexpr int kMaxExponent = 8;  // kMax = 1.75 * 2^8
};
struct E5M2 {
  static constexpr int kMantissa = 2, kBias = 15, kSignBit = 7;
  static constexpr std::uint32_t kMinNormalBits = 0x38800000U;  // 2^-14
  static constexpr std::uint32_t kMaxBits = 0x47600000U;        // 57344
  static constexpr std::uint32_t kLargestCode = 0x7B, kNanCode = 0x7F;
  static constexpr float kShift = 128.0F, kStep = 1.52587890625e-5F, kMax = 57344.0F;
  static constexpr int kMaxExponent = 15;  // kMax = 1.75 * 2^15
};
// No NaN: it becomes 6, as on CUDA; blocks say NaN in their scale.
struct E2M1 {
  static constexpr int kMantissa = 1, kBias = 1, kSignBit = 3;
  static constexpr std::uint32_t kMinNormalBits = 0x3F800000U;  // 1
  static constexpr std::uint32_t kMaxBits = 0x40C00000U;        // 6
  static constexpr std::uint32_t kLargestCode = 0x7, kNanCode = 0x7;
  static constexpr float kShift = 4194304.0F, kStep = 0.5F, kMax = 6.0F;
};

template <typename Format>
[[nodiscard]] WHERRY_HD inline std::uint8_t float_to_low(float value) noexcept {
  const std::uint32_t bits = float_bits(value);
  const std::uint32_t magnitude = bits & 0x7FFFFFFFU;
  if (magnitude > kInfinityBits) return static_cast<std::uint8_t>(Format::kNanCode);
  const std::uint32_t sign = (bits >> 31) << Format::kSignBit;
  if (magnitude >= Format::kMaxBits) return static_cast<std::uint8_t>(sign | Format::kLargestCode);
  if (magnitude < Format::kMinNormalBits) {
    const std::uint32_t shifted = float_bits(bits_float(magnitude) + Format::kShift);
    return static_cast<std::uint8_t>(sign | (shifted - float_bits(Format::kShift)));
  }
  constexpr int kDropped = 23 - Format::kMantissa;
  const std::uint32_t rounded =
      magnitude + ((1U << (kDropped - 1)) - 1U) + ((magnitude >> kDropped) & 1U);
  constexpr std::uint32_t kRebias = (127U - Format::kBias) << Format::kMantissa;
  return static_cast<std::uint8_t>(sign | ((rounded >> kDropped) - kRebias));
}

// Exact. Bits above the sign are ignored; the infinities of e5m2, which we never write, are read.
template <typename Format>
[[nodiscard]] WHERRY_HD inline float low_to_float(std::uint32_t code) noexcept {
  const std::uint32_t sign = ((code >> Format::kSignBit) & 1U) << 31;
  const std::uint32_t magnitude = code & ((1U << Format::kSignBit) - 1U);
  if (magnitude > Format::kLargestCode) {
    const bool infinite = Format::kMantissa == 2 && magnitude == 0x7C;
    return bits_float(infinite ? sign | kInfinityBits : 0x7FC00000U);
  }
  if (magnitude < (1U << Format::kMantissa)) {
    return bits_float(sign | float_bits(static_cast<float>(magnitude) * Format::kStep));
  }
  constexpr std::uint32_t kRebias = (127U - Format::kBias) << 23;
  return bits_float(sign | ((magnitude << (23 - Format::kMantissa)) + kRebias));
}

// Symmetric 8-bit integers: nearest even, clamped to +-127. Not for NaN.
[[nodiscard]] WHERRY_HD inline std::int8_t float_to_int8(float value) noexcept {
  const std::uint32_t magnitude = float_bits(value) & 0x7FFFFFFFU;
  if (magnitude >= 0x42FE0000U) return value < 0 ? -127 : 127;
  constexpr float kShiftInteger = 12582912.0F;  // 1.5 * 2^23: the sum's last place is 1
  return static_cast<std::int8_t>(float_bits(value + kShiftInteger) - float_bits(kShiftInteger));
}

// ---- Powers of two (E8M0): the byte e stands for 2^(e-127), 255 for NaN -------------------------

// The exponent rounded up: the smallest power of two that is not below a value >= 0.
[[nodiscard]] WHERRY_HD inline std::uint8_t float_to_e8m0_up(float value) noexcept {
  const std::uint32_t bits = float_bits(value);
  if (bits > kInfinityBits) return 255;
  if (bits <= 0x00400000U) return 0;  // at most 2^-127
  const std::uint32_t up = (bits + 0x7FFFFFU) >> 23;
  return static_cast<std::uint8_t>(up < 254U ? up : 254U);
}
[[nodiscard]] WHERRY_HD inline float e8m0_to_float(std::uint32_t code) noexcept {
  if (code == 255U) return bits_float(0x7FC00000U);
  return bits_float(code == 0 ? 0x00400000U : code << 23);
}
// 1 / e8m0_to_float(code), exact: multiplying by it is dividing.
[[nodiscard]] WHERRY_HD inline float e8m0_reciprocal(std::uint32_t code) noexcept {
  return code == 255U ? e8m0_to_float(255U) : e8m0_to_float(254U - code);
}

// ---- Scales of blocks ----------------------------------------------------------------------------
// A block is reduced to the largest of its magnitudes, as fp32 bits, whose integer order is that of
// the values, with infinity above and NaN above all.

[[nodiscard]] WHERRY_HD inline std::uint32_t magnitude_bits(float value) noexcept {
  return float_bits(value) & 0x7FFFFFFFU;
}
// For scales that a NaN must not touch: NaN counts as 0, infinity as the largest finite value.
[[nodiscard]] WHERRY_HD inline std::uint32_t finite_magnitude_bits(float value) noexcept {
  const std::uint32_t bits = magnitude_bits(value);
  if (bits > kInfinityBits) return 0;
  return bits < kLargestBits ? bits : kLargestBits;
}

// amax / max; 1 for zeros, and never 0: 0 / 0 has no place in a block.
[[nodiscard]] WHERRY_HD inline float scale_of(std::uint32_t amax, float max) noexcept {
  if (amax == 0) return 1.0F;
  const float scale = bits_float(amax) / max;
  return scale > 0 ? scale : kSmallestFloat;
}

// The smallest power of two >= amax / Format::kMax, as E8M0, in whole numbers; 1 for zeros.
template <typename Format>
[[nodiscard]] WHERRY_HD inline std::uint8_t scale_of_pow2(std::uint32_t amax) noexcept {
  if (amax == 0) return 127;
  const int up = (amax & 0x7FFFFFU) > 0x600000U ? 1 : 0;
  const int exponent = static_cast<int>(amax >> 23) - Format::kMaxExponent + up;
  return static_cast<std::uint8_t>(exponent > 0 ? exponent : 0);
}

// How the scale of a block of 8-bit floats is found and its elements divided.
enum class ScaleRule {
  exact,        // scale = amax / max; x / scale
  pow2,         // the smallest power of two >= amax / max
  deepep,       // amax at least 1e-4; scale = amax * fp32(1/max); x * (max / amax)
  deepep_pow2,  // amax at least 1e-4; amax * fp32(1/max) rounded up to a power of two
  mx,           // amax * fp32(1/max) rounded up to a power of two; a NaN takes the whole block
};

struct BlockScale {
  float scale;  // what an element is multiplied by to get its value back
  float by;     // what it is multiplied by to be encoded; ScaleRule::exact divides instead
  std::uint8_t exponent;  // E8M0 of scale where that is a power of two
};

template <ScaleRule kRule>
[[nodiscard]] WHERRY_HD inline std::uint32_t block_magnitude_bits(float value) noexcept {
  return kRule == ScaleRule::mx ? magnitude_bits(value) : finite_magnitude_bits(value);
}

// amax: the largest block_magnitude_bits<kRule> of the block.
template <typename Format, ScaleRule kRule>
[[nodiscard]] WHERRY_HD inline BlockScale block_scale(std::uint32_t amax) noexcept {
  constexpr float kReciprocal = 1.0F / Format::kMax;
  if constexpr (kRule == ScaleRule::exact) {
    return {scale_of(amax, Format::kMax), 0.0F, 0};
  } else if constexpr (kRule == ScaleRule::deepep) {
    const float largest = bits_float(amax) > 1e-4F ? bits_float(amax) : 1e-4F;
    return {largest * kReciprocal, Format::kMax / largest, 0};
  } else {
    std::uint8_t exponent = 0;
    if constexpr (kRule == ScaleRule::pow2) {
      exponent = scale_of_pow2<Format>(amax);
    } else if constexpr (kRule == ScaleRule::deepep_pow2) {
      const float largest = bits_float(amax) > 1e-4F ? bits_float(amax) : 1e-4F;
      exponent = float_to_e8m0_up(largest * kReciprocal);
    } else {
      exponent = float_to_e8m0_up(bits_float(amax) * kReciprocal);
    }
    return {e8m0_to_float(exponent), e8m0_reciprocal(exponent), exponent};
  }
}

// The element under the scale of its block, before it is rounded to the format.
template <ScaleRule kRule>
[[nodiscard]] WHERRY_HD inline float scaled_in_block(float value, const BlockScale& s) noexcept {
  return kRule == ScaleRule::exact ? value / s.scale : value * s.by;
}
template <typename Format, ScaleRule kRule>
[[nodiscard]] WHERRY_HD inline std::uint8_t encode_in_block(float value,
                                                            const BlockScale& s) noexcept {
  return float_to_low<Format>(scaled_in_block<kRule>(value, s));
}

// int8_token: the scale of a row, from its largest magnitude (a NaN takes the row), and its elements.
[[nodiscard]] WHERRY_HD inline float int8_scale(std::uint32_t amax) noexcept {
  if (amax > kInfinityBits) return bits_float(0x7FC00000U);
  return scale_of(amax < kLargestBits ? amax : kLargestBits, 127.0F);
}
[[nodiscard]] WHERRY_HD inline std::int8_t int8_encode(float value, float scale) noexcept {
  return scale != scale ? static_cast<std::int8_t>(0) : float_to_int8(value / scale);
}

// nvfp4: the fp32 scale of a row (from its largest finite magnitude), the e4m3 scale of a block in
// it (from its largest magnitude: a NaN takes the block) and the element under both.
[[nodiscard]] WHERRY_HD inline float nvfp4_row_scale(std::uint32_t row_amax) noexcept {
  return scale_of(row_amax, E4M3::kMax * E2M1::kMax);
}
[[nodiscard]] WHERRY_HD inline std::uint8_t nvfp4_block_scale(std::uint32_t amax,
                                                              float row_scale) noexcept {
  if (amax > kInfinityBits) return static_cast<std::uint8_t>(E4M3::kNanCode);
  return float_to_low<E4M3>(bits_float(amax) / (row_scale * E2M1::kMax));
}
// `scale` is row_scale * block scale. A block too small for its row has scale 0: signed zeros.
[[nodiscard]] WHERRY_HD inline std::uint8_t nvfp4_encode(float value, float scale) noexcept {
  if (scale != scale) return 0;
  return float_to_low<E2M1>(scale > 0 ? value / scale : value * 0.0F);
}

}  // namespace wherry
