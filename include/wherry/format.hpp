// Wire formats: the number formats in which rows travel, and their conversion from and to the rows
// of the caller. Pure functions on host memory: nothing here keeps state, allocates per row or owns
// what the caller passes; any number of threads may call them.
//
// A converted row has two parts, which live in separate planes: the payload, one code an element,
// and the scales, one a block (none for unquantised wires). The conversions are part of the
// numerics contract: the same bits from every kernel set, on CPU and CUDA.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "wherry/types.hpp"

namespace wherry {

// Unless it says otherwise, a quantised format divides each element by its block's scale in fp32
// and rounds to nearest even. Elements beyond the largest code saturate, infinity too (it counts as
// the largest finite fp32 when a scale is computed). A block of zeros has scale 1, and signed zeros
// keep their sign where the code has one. amax: the largest magnitude of a block.
enum class Wire : std::uint8_t {
  same,  // whatever the dtype of the rows is
  // One element as it is. Narrowing rounds once, widening is exact, the same dtype moves bits.
  bf16,
  f16,
  f32,
  f64,
  raw,  // opaque bytes; only for DType::raw
  // 8-bit floats, blocks of 128 with fp32 scales. A NaN stays in its element, the rest of the
  // block is encoded as if it were 0. The last block of a row may be shorter, here and below.
  e4m3_block128,              // scale = amax / 448; DeepSeek-V3's activations
  e4m3_block128_pow2,         // scale = the smallest power of two >= amax / 448, at least 2^-127
  e4m3_block128_deepep,       // bitwise DeepEP: amax >= 1e-4, scale = amax * fp32(1/448),
                              // x * (448 / amax) instead of the division
  e4m3_block128_deepep_pow2,  // bitwise DeepEP with rounded scales: 2^ceil(log2 of that scale)
  e5m2_block128,              // amax / 57344
  e5m2_block128_pow2,
  // OCP microscaling: blocks of 32, a power of two as one byte (E8M0): the exponent of
  // amax * fp32(1/448), or fp32(1/57344), rounded up, so that nothing clips. A zero block has byte
  // 0, infinity 254; a NaN makes its whole block NaN (byte 255).
  mxfp8_e4m3,
  mxfp8_e5m2,
  // Blocks of 16 4-bit floats, two a byte, the earlier in the low half. One fp32 scale s a row:
  // amax of the row / 2688; one e4m3 scale b a block: amax / (6 * s); elements x / (b * s). A NaN
  // makes its whole block NaN; a block far below its row (b = 0) becomes zeros.
  nvfp4,
  // 8-bit integers -127..127, one fp32 scale a row: amax / 127. A NaN makes its whole row NaN.
  int8_token,
};
[[nodiscard]] std::string_view name(Wire wire) noexcept;
// Throws bad_argument listing the names that exist.
[[nodiscard]] Wire wire_named(std::string_view name);
// Every wire, in the order of the enumeration.
[[nodiscard]] std::span<const Wire> all_wires() noexcept;

// Where the scales of many rows lie in their plane. Every line of the plane starts on 16 bytes.
enum class ScaleLayout : std::uint8_t {
  row_major,     // a line a row: all its scales
  column_major,  // a line a block: the scales of all rows (grouped GEMMs that load them by columns)
  packed_ue8m0,  // only powers of two: a line per 4 blocks, of 4 bytes a row, the earliest block in
                 // the lowest byte; missing blocks are 0 (DeepGEMM on sm_100)
};
[[nodiscard]] std::string_view name(ScaleLayout layout) noexcept;

// What one scale is.
enum class ScaleType : std::uint8_t {
  none,
  f32,
  e8m0,      // one byte e: 2^(e-127)
  e4m3_f32,  // nvfp4: one e4m3 byte a block and one fp32 a row
};
[[nodiscard]] std::string_view name(ScaleType type) noexcept;

// Everything about the rows of one wire. Trivially copyable: kernels take it by value. Made by
// wire_format(); not to be filled by hand.
struct WireFormat {
  Wire wire = Wire::bf16;     // never `same`
  DType dtype = DType::bf16;  // of the caller's rows
  std::int64_t hidden = 0;    // elements a row
  ScaleLayout scale_layout = ScaleLayout::row_major;
  ScaleType scale_type = ScaleType::none;
  std::int64_t block = 0;          // elements that share a scale; 0 without scales
  std::int64_t num_blocks = 0;     // a row
  std::int64_t payload_bytes = 0;  // of one row
  std::int64_t scale_bytes = 0;    // of one row alone, as quantize_row writes them

  // From one row to the next in windows: rounded up to 16.
  [[nodiscard]] constexpr std::int64_t payload_pitch() const noexcept {
    return (payload_bytes + 15) / 16 * 16;
  }
  [[nodiscard]] constexpr std::int64_t scale_pitch() const noexcept {
    return (scale_bytes + 15) / 16 * 16;
  }
  // What travels for one row.
  [[nodiscard]] constexpr std::int64_t row_bytes() const noexcept {
    return payload_bytes + scale_bytes;
  }
  [[nodiscard]] constexpr bool quantised() const noexcept { return scale_type != ScaleType::none; }
  // The caller's rows and those on the wire have the same bits.
  [[nodiscard]] constexpr bool keeps_dtype() const noexcept {
    switch (dtype) {
      case DType::bf16: return wire == Wire::bf16;
      case DType::f16: return wire == Wire::f16;
      case DType::f32: return wire == Wire::f32;
      case DType::f64: return wire == Wire::f64;
      case DType::raw: return wire == Wire::raw;
    }
    return false;
  }
  [[nodiscard]] bool operator==(const WireFormat&) const = default;
};

// The rows of `wire` for rows of `hidden` elements (bytes for raw) of `dtype`. Quantised wires take
// bf16, f16 and f32. packed_ue8m0 goes with the power-of-two wires alone; their scales are fp32
// (mxfp8: bytes) in the other layouts. Throws bad_argument.
[[nodiscard]] WireFormat wire_format(Wire wire, DType dtype, std::int64_t hidden,
                                     ScaleLayout scale_layout = ScaleLayout::row_major);

// ---- One row ---------------------------------------------------------------------------------

// Converts one row: x [hidden] of format.dtype to payload [payload_bytes] and scales [scale_bytes]
// (may be null where that is 0). Scales alone: num_blocks fp32 or bytes in block order; packed:
// bytes, zeros up to a multiple of 4; nvfp4: bytes, zeros up to a multiple of 4, then the fp32.
// x aligned to its elements, payload and scales to 4 bytes (f64: 8). Does not check its arguments.
void quantize_row(const WireFormat& format, const void* x, void* payload, void* scales);

// The reverse, to a row of format.dtype: the fp32 product of code and scale (nvfp4: code times
// the product of both scales), rounded once more to the dtype. Every NaN becomes the one NaN of the
// dtype, but unquantised rows of the same dtype keep their bits.
void dequantize_row(const WireFormat& format, const void* payload, const void* scales, void* x);

// ---- Many rows -------------------------------------------------------------------------------

// Bytes of the plane that holds the scales of `rows` rows in format.scale_layout, padding included.
[[nodiscard]] std::int64_t scale_plane_bytes(const WireFormat& format, std::int64_t rows) noexcept;
// Where in it the scale of (row, block) is, in bytes from its start.
[[nodiscard]] std::int64_t scale_offset(const WireFormat& format, std::int64_t rows,
                                        std::int64_t row, std::int64_t block) noexcept;
// nvfp4: where the fp32 scale of a row is: after the blocks' in row_major (a multiple of 4), a line
// of its own after all blocks' in column_major.
[[nodiscard]] std::int64_t row_scale_offset(const WireFormat& format, std::int64_t rows,
                                            std::int64_t row) noexcept;

// Converted rows in host memory. Non-owning. `rows` is also what the scale plane was laid out for.
template <typename Pointer>
struct BasicWireRows {
  Pointer payload = nullptr;
  Pointer scales = nullptr;  // [scale_plane_bytes(format, rows)]; null where that is 0
  std::int64_t rows = 0;
  std::int64_t payload_pitch_bytes = 0;  // 0: format.payload_pitch()
};
using WireRows = BasicWireRows<void*>;
using ConstWireRows = BasicWireRows<const void*>;

// Converts x [rows, hidden] of format.dtype. Writes payload_bytes of each payload row, and the
// whole scale plane (its padding is 0). Throws bad_argument where shape, dtype, pitch or a null
// pointer do not fit.
void quantize(const WireFormat& format, ConstTensorView x, const WireRows& out);
void dequantize(const WireFormat& format, const ConstWireRows& in, TensorView x);

}  // namespace wherry
