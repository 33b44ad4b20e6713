// Where the scale of (row, block) lies in the plane of many rows, for host and device: what
// wherry/format.hpp promises of its scale layouts. Every line of a plane starts on 16 bytes.
#pragma once

#include <cstdint>

#include "kernels/layout.hpp"
#include "wherry/format.hpp"

namespace wherry::kernels {

[[nodiscard]] WHERRY_HD constexpr std::int64_t scale_line(std::int64_t bytes) noexcept {
  return (bytes + 15) / 16 * 16;
}
// Of the scale of one block.
[[nodiscard]] WHERRY_HD constexpr std::int64_t block_scale_bytes(
    const WireFormat& format) noexcept {
  return format.scale_type == ScaleType::f32 ? 4 : 1;
}
// Blocks that have a place: nvfp4 and packed scales are filled up with zeros to whole words.
[[nodiscard]] WHERRY_HD constexpr std::int64_t num_scale_places(const WireFormat& format) noexcept {
  const bool words =
      format.scale_layout == ScaleLayout::packed_ue8m0 ||
      (format.scale_layout == ScaleLayout::row_major && format.scale_type == ScaleType::e4m3_f32);
  return words ? (format.num_blocks + 3) / 4 * 4 : format.num_blocks;
}
[[nodiscard]] WHERRY_HD constexpr std::int64_t scale_place(const WireFormat& format,
                                                           std::int64_t rows, std::int64_t row,
                                                           std::int64_t block) noexcept {
  const std::int64_t each = block_scale_bytes(format);
  switch (format.scale_layout) {
    case ScaleLayout::row_major: return row * scale_line(format.scale_bytes) + block * each;
    case ScaleLayout::column_major: return block * scale_line(rows * each) + row * each;
    case ScaleLayout::packed_ue8m0: return block / 4 * scale_line(rows * 4) + row * 4 + block % 4;
  }
  return 0;
}
// Of the scale that a whole row has beside those of its blocks (nvfp4).
[[nodiscard]] WHERRY_HD constexpr std::int64_t row_scale_place(const WireFormat& format,
                                                               std::int64_t rows,
                                                               std::int64_t row) noexcept {
  if (format.scale_layout == ScaleLayout::row_major) {
    return row * scale_line(format.scale_bytes) + format.scale_bytes - 4;
  }
  return format.num_blocks * scale_line(rows) + row * 4;
}

}  // namespace wherry::kernels
