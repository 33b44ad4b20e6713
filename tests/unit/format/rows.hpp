// Rows and their converted form for the tests of formats.
#pragma once

#include <cstring>
#include <vector>

#include "kernels/numerics_low.hpp"
#include "wherry/format.hpp"

namespace wherry::test {

// One converted row of fp32.
struct ConvertedRow {
  WireFormat format;
  std::vector<std::byte> payload;
  std::vector<std::byte> scales;

  [[nodiscard]] unsigned code(std::size_t i) const {
    if (format.wire == Wire::nvfp4) {
      return std::to_integer<unsigned>(payload[i / 2] >> (i % 2 * 4)) & 0xFU;
    }
    return std::to_integer<unsigned>(payload[i]);
  }
  [[nodiscard]] float scale(std::size_t block) const {
    float value = 0;
    std::memcpy(&value, scales.data() + block * 4, sizeof value);
    return value;
  }
  [[nodiscard]] unsigned scale_byte(std::size_t block) const {
    return std::to_integer<unsigned>(scales[block]);
  }
  // nvfp4: the fp32 scale of the row.
  [[nodiscard]] float row_scale() const { return scale(scales.size() / 4 - 1); }
  // Back to fp32.
  [[nodiscard]] std::vector<float> values() const {
    std::vector<float> x(static_cast<std::size_t>(format.hidden));
    dequantize_row(format, payload.data(), scales.data(), x.data());
    return x;
  }
};

[[nodiscard]] inline ConvertedRow convert(Wire wire, const std::vector<float>& x,
                                          ScaleLayout layout = ScaleLayout::row_major) {
  ConvertedRow row;
  row.format = wire_format(wire, DType::f32, static_cast<std::int64_t>(x.size()), layout);
  row.payload.resize(static_cast<std::size_t>(row.format.payload_bytes));
  row.scales.resize(static_cast<std::size_t>(row.format.scale_bytes));
  quantize_row(row.format, x.data(), row.payload.data(), row.scales.data());
  return row;
}

inline constexpr Wire kQuantisedWires[] = {Wire::e4m3_block128,
                                           Wire::e4m3_block128_pow2,
                                           Wire::e4m3_block128_deepep,
                                           Wire::e4m3_block128_deepep_pow2,
                                           Wire::e5m2_block128,
                                           Wire::e5m2_block128_pow2,
                                           Wire::mxfp8_e4m3,
                                           Wire::mxfp8_e5m2,
                                           Wire::nvfp4,
                                           Wire::int8_token};

}  // namespace wherry::test
