// What each wire format is made of: names, sizes and where scales lie.
#include <algorithm>
#include <array>
#include <string>

#include "kernels/scale_places.hpp"
#include "support/check.hpp"
#include "wherry/format.hpp"

namespace wherry {

namespace {

struct WireTraits {
  std::string_view name;
  int element_bits;
  int block;  // kWholeRow: one scale a row
  ScaleType scale_type;
  bool pow2;  // scales can be packed as bytes
};
constexpr int kWholeRow = -1;

constexpr WireTraits traits(Wire wire) noexcept {
  switch (wire) {
    case Wire::same: return {"same", 0, 0, ScaleType::none, false};
    case Wire::bf16: return {"bf16", 16, 0, ScaleType::none, false};
    case Wire::f16: return {"f16", 16, 0, ScaleType::none, false};
    case Wire::f32: return {"f32", 32, 0, ScaleType::none, false};
    case Wire::f64: return {"f64", 64, 0, ScaleType::none, false};
    case Wire::raw: return {"raw", 8, 0, ScaleType::none, false};
    case Wire::e4m3_block128: return {"e4m3_block128", 8, 128, ScaleType::f32, false};
    case Wire::e4m3_block128_pow2: return {"e4m3_block128_pow2", 8, 128, ScaleType::f32, true};
    case Wire::e4m3_block128_deepep: return {"e4m3_block128_deepep", 8, 128, ScaleType::f32, false};
    case Wire::e4m3_block128_deepep_pow2:
      return {"e4m3_block128_deepep_pow2", 8, 128, ScaleType::f32, true};
    case Wire::e5m2_block128: return {"e5m2_block128", 8, 128, ScaleType::f32, false};
    case Wire::e5m2_block128_pow2: return {"e5m2_block128_pow2", 8, 128, ScaleType::f32, true};
    case Wire::mxfp8_e4m3: return {"mxfp8_e4m3", 8, 32, ScaleType::e8m0, true};
    case Wire::mxfp8_e5m2: return {"mxfp8_e5m2", 8, 32, ScaleType::e8m0, true};
    case Wire::nvfp4: return {"nvfp4", 4, 16, ScaleType::e4m3_f32, false};
    case Wire::int8_token: return {"int8_token", 8, kWholeRow, ScaleType::f32, false};
  }
  return {"same", 0, 0, ScaleType::none, false};
}

constexpr std::array kAllWires{
    Wire::same,
    Wire::bf16,
    Wire::f16,
    Wire::f32,
    Wire::f64,
    Wire::raw,
    Wire::e4m3_block128,
    Wire::e4m3_block128_pow2,
    Wire::e4m3_block128_deepep,
    Wire::e4m3_block128_deepep_pow2,
    Wire::e5m2_block128,
    Wire::e5m2_block128_pow2,
    Wire::mxfp8_e4m3,
    Wire::mxfp8_e5m2,
    Wire::nvfp4,
    Wire::int8_token,
};

constexpr Wire wire_of(DType dtype) noexcept {
  switch (dtype) {
    case DType::bf16: return Wire::bf16;
    case DType::f16: return Wire::f16;
    case DType::f32: return Wire::f32;
    case DType::f64: return Wire::f64;
    case DType::raw: return Wire::raw;
  }
  return Wire::raw;
}

void check_combination(Wire wire, DType dtype, ScaleLayout layout, const WireTraits& of_wire) {
  const bool quantised = of_wire.scale_type != ScaleType::none;
  WHERRY_CHECK_ARGUMENT((wire == Wire::raw) == (dtype == DType::raw), Stage::format,
                        "rows of {} cannot travel as {}; raw goes with raw alone", name(dtype),
                        of_wire.name);
  WHERRY_CHECK_ARGUMENT(!quantised || dtype != DType::f64, Stage::format,
                        "rows of f64 cannot travel as {}; quantised wires take bf16, f16, f32",
                        of_wire.name);
  WHERRY_CHECK_ARGUMENT(layout != ScaleLayout::packed_ue8m0 || of_wire.pow2, Stage::format,
                        "the scales of {} are no powers of two: packed_ue8m0 goes with *_pow2 and "
                        "mxfp8_* alone",
                        of_wire.name);
}

std::int64_t scale_bytes_of(const WireFormat& format) noexcept {
  const std::int64_t rounded = (format.num_blocks + 3) / 4 * 4;
  switch (format.scale_type) {
    case ScaleType::none: return 0;
    case ScaleType::f32: return format.num_blocks * 4;
    case ScaleType::e8m0:
      return format.scale_layout == ScaleLayout::packed_ue8m0 ? rounded : format.num_blocks;
    case ScaleType::e4m3_f32: return rounded + 4;
  }
  return 0;
}

}  // namespace

std::string_view name(Wire wire) noexcept { return traits(wire).name; }

std::string_view name(ScaleLayout layout) noexcept {
  switch (layout) {
    case ScaleLayout::row_major: return "row_major";
    case ScaleLayout::column_major: return "column_major";
    case ScaleLayout::packed_ue8m0: return "packed_ue8m0";
  }
  return "row_major";
}

std::string_view name(ScaleType type) noexcept {
  switch (type) {
    case ScaleType::none: return "none";
    case ScaleType::f32: return "f32";
    case ScaleType::e8m0: return "e8m0";
    case ScaleType::e4m3_f32: return "e4m3_f32";
  }
  return "none";
}

std::span<const Wire> all_wires() noexcept { return kAllWires; }

Wire wire_named(std::string_view wanted) {
  const auto* found = std::ranges::find(kAllWires, wanted, [](Wire wire) { return name(wire); });
  if (found != kAllWires.end()) return *found;
  std::string names;
  for (const Wire wire : kAllWires) {
    names += names.empty() ? "" : ", ";
    names += name(wire);
  }
  throw Error(ErrorCode::bad_argument, {Stage::format, -1, -1},
              fmt::format("no wire format is named '{}'; there are: {}", wanted, names));
}

WireFormat wire_format(Wire wire, DType dtype, std::int64_t hidden, ScaleLayout scale_layout) {
  if (wire == Wire::same) wire = wire_of(dtype);
  const WireTraits of_wire = traits(wire);
  constexpr std::int64_t kMostHidden = std::int64_t{1} << 40;  // 2^43 bytes a row: no overflow
  WHERRY_CHECK_ARGUMENT(hidden >= 1 && hidden <= kMostHidden, Stage::format,
                        "hidden is {}; allowed: 1 to {}", hidden, kMostHidden);
  check_combination(wire, dtype, scale_layout, of_wire);

  WireFormat format;
  format.wire = wire;
  format.dtype = dtype;
  format.hidden = hidden;
  format.scale_layout = scale_layout;
  format.scale_type =
      scale_layout == ScaleLayout::packed_ue8m0 ? ScaleType::e8m0 : of_wire.scale_type;
  format.payload_bytes = (hidden * of_wire.element_bits + 7) / 8;
  format.block = of_wire.block == kWholeRow ? hidden : of_wire.block;
  if (format.block > 0) format.num_blocks = (hidden + format.block - 1) / format.block;
  format.scale_bytes = scale_bytes_of(format);
  return format;
}

std::int64_t scale_plane_bytes(const WireFormat& format, std::int64_t rows) noexcept {
  if (!format.quantised()) return 0;
  switch (format.scale_layout) {
    case ScaleLayout::row_major: return rows * format.scale_pitch();
    case ScaleLayout::column_major: {
      const std::int64_t row_scales =
          format.scale_type == ScaleType::e4m3_f32 ? kernels::scale_line(rows * 4) : 0;
      return format.num_blocks * kernels::scale_line(rows * kernels::block_scale_bytes(format)) +
             row_scales;
    }
    case ScaleLayout::packed_ue8m0:
      return (format.num_blocks + 3) / 4 * kernels::scale_line(rows * 4);
  }
  return 0;
}

std::int64_t scale_offset(const WireFormat& format, std::int64_t rows, std::int64_t row,
                          std::int64_t block) noexcept {
  return kernels::scale_place(format, rows, row, block);
}

std::int64_t row_scale_offset(const WireFormat& format, std::int64_t rows,
                              std::int64_t row) noexcept {
  return kernels::row_scale_place(format, rows, row);
}

}  // namespace wherry
