// From a wire format at run time to the element format and scale rule at compile time, and where the
// scales of one row lie: alone, and in the plane of many rows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/numerics_low.hpp"
#include "wherry/format.hpp"

namespace wherry::kernels {

// Calls fn.template operator()<Element format, ScaleRule>() for wires of 8-bit floats in blocks;
// the others call nothing. On the device too, where fn is of the device.
#if defined(__CUDACC__)
#pragma nv_exec_check_disable
#endif
template <typename Fn>
WHERRY_HD void with_block_wire(Wire wire, Fn fn) {
  using enum ScaleRule;
  switch (wire) {
    case Wire::e4m3_block128: fn.template operator()<E4M3, exact>(); return;
    case Wire::e4m3_block128_pow2: fn.template operator()<E4M3, pow2>(); return;
    case Wire::e4m3_block128_deepep: fn.template operator()<E4M3, deepep>(); return;
    case Wire::e4m3_block128_deepep_pow2: fn.template operator()<E4M3, deepep_pow2>(); return;
    case Wire::e5m2_block128: fn.template operator()<E5M2, exact>(); return;
    case Wire::e5m2_block128_pow2: fn.template operator()<E5M2, pow2>(); return;
    case Wire::mxfp8_e4m3: fn.template operator()<E4M3, mx>(); return;
    case Wire::mxfp8_e5m2: fn.template operator()<E5M2, mx>(); return;
    case Wire::same:
    case Wire::bf16:
    case Wire::f16:
    case Wire::f32:
    case Wire::f64:
    case Wire::raw:
    case Wire::nvfp4:
    case Wire::int8_token: return;
  }
}

// What an unquantised wire carries.
[[nodiscard]] WHERRY_HD constexpr DType plain_dtype(Wire wire) noexcept {
  switch (wire) {
    case Wire::bf16: return DType::bf16;
    case Wire::f16: return DType::f16;
    case Wire::f32: return DType::f32;
    case Wire::f64: return DType::f64;
    case Wire::same:
    case Wire::raw:
    case Wire::e4m3_block128:
    case Wire::e4m3_block128_pow2:
    case Wire::e4m3_block128_deepep:
    case Wire::e4m3_block128_deepep_pow2:
    case Wire::e5m2_block128:
    case Wire::e5m2_block128_pow2:
    case Wire::mxfp8_e4m3:
    case Wire::mxfp8_e5m2:
    case Wire::nvfp4:
    case Wire::int8_token: break;
  }
  return DType::raw;
}

// The scale of a block among the scales of one row alone. The last one also fills up what is packed.
inline void put_block_scale(const WireFormat& format, std::byte* scales, std::int64_t block,
                            const BlockScale& scale) noexcept {
  if (format.scale_type == ScaleType::f32) {
    std::memcpy(scales + block * 4, &scale.scale, 4);
    return;
  }
  scales[block] = std::byte{scale.exponent};
  if (block + 1 == format.num_blocks) {
    for (std::int64_t i = block + 1; i < format.scale_bytes; ++i) scales[i] = std::byte{0};
  }
}
[[nodiscard]] inline float get_block_scale(const WireFormat& format, const std::byte* scales,
                                           std::int64_t block) noexcept {
  if (format.scale_type != ScaleType::f32) {
    return e8m0_to_float(std::to_integer<std::uint32_t>(scales[block]));
  }
  float scale = 0;
  std::memcpy(&scale, scales + block * 4, 4);
  return scale;
}

namespace detail {

// fn(offset in the plane, offset among the scales of the row alone, bytes) for each piece that is
// contiguous in both.
template <typename Fn>
void for_scales(const WireFormat& format, std::int64_t rows, std::int64_t row, Fn fn) {
  if (format.scale_layout == ScaleLayout::row_major) {
    fn(scale_offset(format, rows, row, 0), std::int64_t{0}, format.scale_bytes);
    return;
  }
  const bool packed = format.scale_layout == ScaleLayout::packed_ue8m0;
  const std::int64_t blocks = packed ? 4 : 1;  // that lie together
  const std::int64_t bytes = packed || format.scale_type == ScaleType::f32 ? 4 : 1;
  for (std::int64_t block = 0; block < format.num_blocks; block += blocks) {
    fn(scale_offset(format, rows, row, block), block / blocks * bytes, bytes);
  }
  if (format.scale_type == ScaleType::e4m3_f32) {
    fn(row_scale_offset(format, rows, row), format.scale_bytes - 4, std::int64_t{4});
  }
}

}  // namespace detail

// Between `alone`, the scales of one row as quantize_row() lays them out, and the plane of `rows`
// rows. Both do nothing for formats without scales.
inline void put_scales(const WireFormat& format, std::byte* plane, std::int64_t rows,
                       std::int64_t row, const std::byte* alone) noexcept {
  if (!format.quantised()) return;
  detail::for_scales(format, rows, row, [&](auto at, auto from, auto bytes) {
    std::memcpy(plane + at, alone + from, static_cast<std::size_t>(bytes));
  });
}
inline void get_scales(const WireFormat& format, const std::byte* plane, std::int64_t rows,
                       std::int64_t row, std::byte* alone) noexcept {
  if (!format.quantised()) return;
  detail::for_scales(format, rows, row, [&](auto at, auto to, auto bytes) {
    std::memcpy(alone + to, plane + at, static_cast<std::size_t>(bytes));
  });
}

}  // namespace wherry::kernels
