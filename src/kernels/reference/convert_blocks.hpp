// The blocks of 8-bit floats and the rows of int8, element by element. The SIMD kernels come here
// for what they do not take: short blocks, NaN and infinity, magnitudes near the ends of fp32.
#pragma once

#include <algorithm>
#include <cstring>

#include "kernels/numerics_low.hpp"
#include "kernels/reference/elements.hpp"
#include "kernels/wires.hpp"

namespace wherry::kernels::reference {

// A row of the caller's dtype, element by element as fp32.
template <DType kDType>
class Row {
 public:
  using Stored = typename Element<kDType>::Stored;
  explicit Row(const std::byte* x) : x_(reinterpret_cast<const Stored*>(x)) {}
  float operator[](std::int64_t i) const noexcept { return Element<kDType>::load(x_[i]); }

 private:
  const Stored* x_;
};

inline void put_float(std::byte* to, float value) noexcept {
  std::memcpy(to, &value, sizeof value);
}
[[nodiscard]] inline float get_float(const std::byte* from) noexcept {
  float value = 0;
  std::memcpy(&value, from, sizeof value);
  return value;
}

template <DType kDType, typename Format, ScaleRule kRule>
void quantize_block(const WireFormat& format, const std::byte* x, std::byte* payload,
                    std::byte* scales, std::int64_t block) noexcept {
  const Row<kDType> row(x);
  const std::int64_t begin = block * format.block;
  const std::int64_t end = std::min(begin + format.block, format.hidden);
  std::uint32_t amax = 0;
  for (std::int64_t i = begin; i < end; ++i) {
    amax = std::max(amax, block_magnitude_bits<kRule>(row[i]));
  }
  const BlockScale scale = block_scale<Format, kRule>(amax);
  put_block_scale(format, scales, block, scale);
  for (std::int64_t i = begin; i < end; ++i) {
    payload[i] = std::byte{encode_in_block<Format, kRule>(row[i], scale)};
  }
}

template <DType kDType>
void quantize_int8(const WireFormat& format, const std::byte* x, std::byte* payload,
                   std::byte* scales) noexcept {
  const Row<kDType> row(x);
  std::uint32_t amax = 0;
  for (std::int64_t i = 0; i < format.hidden; ++i) {
    amax = std::max(amax, magnitude_bits(row[i]));
  }
  const float scale = int8_scale(amax);
  put_float(scales, scale);
  for (std::int64_t i = 0; i < format.hidden; ++i) {
    payload[i] = static_cast<std::byte>(int8_encode(row[i], scale));
  }
}

// [begin, end) of a row, back to its dtype.
template <DType kDType, typename Format>
void dequantize_blocks(const WireFormat& format, const std::byte* payload, const std::byte* scales,
                       std::byte* x, std::int64_t begin, std::int64_t end) noexcept {
  auto* out = reinterpret_cast<typename Element<kDType>::Stored*>(x);
  for (std::int64_t i = begin; i < end; ++i) {
    const float scale = get_block_scale(format, scales, i / format.block);
    const auto code = std::to_integer<std::uint32_t>(payload[i]);
    out[i] = Element<kDType>::store(low_to_float<Format>(code) * scale);
  }
}

}  // namespace wherry::kernels::reference
