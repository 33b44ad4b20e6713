// Rows between their own dtype and the formats in which they travel (wherry/format.hpp), a piece a warp:
// the formats themselves are those of numerics_low.hpp, for host and device. Which format it is is known
// at run time only, and is the same for a whole warp. Rows in windows have room up to whole 16 bytes.
#pragma once

#include <cuda_fp8.h>

#include <cstdint>

#include "kernels/cuda/any_element.cuh"
#include "kernels/exact_quotient.hpp"
#include "kernels/numerics_low.hpp"
#include "kernels/scale_places.hpp"
#include "kernels/wires.hpp"

namespace wherry::kernels::cuda {

// Host: calls fn.template operator()<Codec>() for rows of format.dtype in the format.
template <typename Fn>
cudaError_t with_codec(const WireFormat& format, Fn fn) {
  if (format.scale_type != ScaleType::none) {
    return format.dtype == DType::f32 ? fn.template operator()<Codec<float, true>>()
                                      : fn.template operator()<Codec<float, true, 2>>();
  }
  if (format.dtype == DType::f64) return fn.template operator()<Codec<double, false>>();
  return fn.template operator()<Codec<float, false>>();
}

// What a lane writes of a row, and the scale of its block: fp32 bits, or a byte.
template <typename C>
struct Encoded {
  uint4 unit[C::kUnits];
  std::uint32_t scale;
};

// --- To a format ----------------------------------------------------------------------------------

// A row of the caller's, as what is encoded. `Loaded` is what is on its way, kAhead pieces of it, while the
// elements before are encoded.
template <typename C>
struct RowSource {
  using Loaded = Packed<C>;
  static constexpr int kAhead = C::kVectors == 2 ? 2 : 1;
  const std::byte* row;
  DType dtype;
  std::uint32_t row_bytes;
  __device__ Loaded load(std::uint32_t element) const {
    return load_packed<C>(dtype, row, element, row_bytes);
  }
  __device__ void widen(const Loaded& loaded, typename C::Values& values) const {
    widen_packed<C>(dtype, loaded, values);
  }
};

[[nodiscard]] WHERRY_HD constexpr bool has_row_scale(Wire wire) noexcept {
  return wire == Wire::int8_token || wire == Wire::nvfp4;
}
// One warp: the scale that a whole row has in int8_token and nvfp4, from all its elements.
template <typename C, typename Source>
__device__ float row_scale(const WireFormat& format, const Source& source) {
  if constexpr (C::kQuantised) {
    if (!has_row_scale(format.wire)) return 1.0F;
    const bool whole = format.wire == Wire::int8_token;
    const auto hidden = static_cast<std::uint32_t>(format.hidden);
    std::uint32_t largest = 0;
#pragma unroll 2
    for (auto element = static_cast<std::uint32_t>(lane_index() * C::kElements); element < hidden;
         element += C::kPieceElements) {
      typename C::Values values;
      source.widen(source.load(element), values);
#pragma unroll
      for (const float value : values.of) {
        largest = max(largest, whole ? magnitude_bits(value) : finite_magnitude_bits(value));
      }
    }
    largest = __reduce_max_sync(kAllLanes, largest);
    return whole ? int8_scale(largest) : nvfp4_row_scale(largest);
  }
  return 1.0F;
}

// float_to_low() of both, by one instruction where there is one.
template <typename Format>
__device__ std::uint32_t floats_to_low(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  constexpr auto kKind = Format::kMantissa == 3 ? __NV_E4M3 : __NV_E5M2;
  return __nv_cvt_float2_to_fp8x2(float2{low, high}, __NV_SATFINITE, kKind);
#else
  return float_to_low<Format>(low) | (std::uint32_t{float_to_low<Format>(high)} << 8);
#endif
}

// fn(divide), where divide(x) is x / divisor.
template <typename Fn>
__device__ void with_quotients(float divisor, Fn fn) {
  const Divisor by = divisor_of(divisor);
  if (by.bounded) {
    fn([&](float x) { return quotient_by(by, x); });
  } else {
    fn([&](float x) { return x / divisor; });
  }
}

// Codes of eight bits: those of elements 2i and 2i + 1 are code_pair(i).
template <typename CodePair>
__device__ void put_pairs(std::uint32_t (&words)[4], CodePair code_pair) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const std::uint32_t pair = code_pair(i);
    words[i / 2] = i % 2 == 0 ? pair : words[i / 2] | (pair << 16);
  }
}

template <typename Format, ScaleRule kRule>
__device__ void encode_blocks(const WireFormat& format, const float (&values)[16],
                              std::uint32_t (&words)[4], std::uint32_t& scale) {
  constexpr int kLanes = (kRule == ScaleRule::mx ? 32 : 128) / 16;
  std::uint32_t amax = 0;
#pragma unroll
  for (const float value : values) amax = max(amax, block_magnitude_bits<kRule>(value));
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    amax = max(amax, __shfl_xor_sync(kAllLanes, amax, distance));
  }
  const BlockScale block = block_scale<Format, kRule>(amax);
  scale = format.scale_type == ScaleType::f32 ? float_bits(block.scale) : block.exponent;
  const auto encode_with = [&](auto scaled) {
    put_pairs(words, [&](int i) {
      return floats_to_low<Format>(scaled(values[2 * i]), scaled(values[2 * i + 1]));
    });
  };
  if constexpr (kRule == ScaleRule::exact) {
    with_quotients(block.scale, encode_with);
  } else {
    encode_with([&](float x) { return scaled_in_block<kRule>(x, block); });
  }
}

__device__ inline void encode_int8(const float (&values)[16], float scale,
                                   std::uint32_t (&words)[4]) {
  if (scale != scale) return;  // a NaN takes the row
  with_quotients(scale, [&](auto divide) {
    put_pairs(words, [&](int i) {
      const auto low = static_cast<std::uint8_t>(float_to_int8(divide(values[2 * i])));
      const auto high = static_cast<std::uint8_t>(float_to_int8(divide(values[2 * i + 1])));
      return low | (std::uint32_t{high} << 8);
    });
  });
}

__device__ inline void encode_nvfp4(const float (&values)[16], float row_scale,
                                    std::uint32_t (&words)[4], std::uint32_t& scale) {
  std::uint32_t amax = 0;
#pragma unroll
  for (const float value : values) amax = max(amax, magnitude_bits(value));
  scale = nvfp4_block_scale(amax, row_scale);
  const float both = row_scale * low_to_float<E4M3>(scale);
  const Divisor by = divisor_of(both);
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const std::uint8_t code =
        by.bounded ? float_to_low<E2M1>(quotient_by(by, values[i])) : nvfp4_encode(values[i], both);
    words[i / 8] |= std::uint32_t{code} << (i % 8 * 4);
  }
}

__device__ inline void quantise_elements(const WireFormat& format, const float (&values)[16],
                                         float row_scale, std::uint32_t (&words)[4],
                                         std::uint32_t& scale) {
  if (format.wire == Wire::int8_token) return encode_int8(values, row_scale, words);
  if (format.wire == Wire::nvfp4) return encode_nvfp4(values, row_scale, words, scale);
  with_block_wire(format.wire, [&]<typename Format, ScaleRule kRule>() {
    encode_blocks<Format, kRule>(format, values, words, scale);
  });
}

// All lanes of a warp; those past the row's end have zeros.
template <typename C>
__device__ Encoded<C> encode(const WireFormat& format, const typename C::Values& values,
                             float row_scale) {
  if constexpr (C::kQuantised) {
    std::uint32_t words[4] = {};
    std::uint32_t scale = 0;
    quantise_elements(format, values.of, row_scale, words, scale);
    return {{{words[0], words[1], words[2], words[3]}}, scale};
  } else {
    Encoded<C> encoded{};
    with_element_of(plain_dtype(format.wire), [&]<typename Element>() {
      round_values<C, Element>(values,
                               [&](int i, const uint4& rounded) { encoded.unit[i] = rounded; });
    });
    return encoded;
  }
}
// A lane's part of a row in a window, `element` < hidden.
template <typename C>
__device__ void store_encoded(const WireFormat& format, std::byte* row, std::uint32_t element,
                              const Encoded<C>& encoded) {
  if constexpr (C::kQuantised) {
    if (format.wire == Wire::nvfp4) {
      *reinterpret_cast<uint2*>(row + element / 2) = {encoded.unit[0].x, encoded.unit[0].y};
    } else {
      *reinterpret_cast<uint4*>(row + element) = encoded.unit[0];
    }
  } else {
    const std::uint32_t bytes = bytes_of(plain_dtype(format.wire));
    const std::uint32_t first = element * bytes;
#pragma unroll
    for (std::uint32_t i = 0; i < C::kUnits; ++i) {
      const std::uint32_t at = first + 16 * i;
      if (i < bytes / 2 && at < format.payload_bytes) {
        *reinterpret_cast<uint4*>(row + at) = encoded.unit[i];
      }
    }
  }
}

// The scales of one row in a plane that is laid out for `rows`.
struct ScalesOfRow {
  std::byte* blocks;  // of its first block
  std::byte* whole;   // nvfp4: of the row itself
  std::int64_t rows;
};
__device__ inline ScalesOfRow scales_of_row(const WireFormat& format, std::byte* plane,
                                            std::int64_t rows, std::int64_t row) {
  return {plane + scale_place(format, rows, row, 0),
          has_row_scale(format.wire)
              ? plane + (format.wire == Wire::nvfp4 ? row_scale_place(format, rows, row)
                                                    : scale_place(format, rows, row, 0))
              : nullptr,
          rows};
}
// From the scale of a row's first block to that of another: the same in every row.
__device__ inline std::int64_t scale_distance(const WireFormat& format, std::int64_t rows,
                                              std::int64_t block) {
  return scale_place(format, rows, 0, block);
}
__device__ inline void store_scale(const WireFormat& format, std::byte* at, std::uint32_t scale) {
  if (format.scale_type == ScaleType::f32) {
    *reinterpret_cast<std::uint32_t*>(at) = scale;
  } else {
    *at = static_cast<std::byte>(scale);
  }
}

// What a lane writes among the scales of a row, if it holds the first elements of a block: its scale, and
// the zeros behind the last one.
struct BlockScaleOf {
  bool writes;
  std::uint32_t scale;
  std::int64_t distance;
  std::int64_t block;
};
__device__ inline BlockScaleOf block_scale_of(const WireFormat& format, std::int64_t rows,
                                              std::uint32_t element, std::uint32_t scale) {
  const auto size = static_cast<std::uint32_t>(format.block);
  const bool writes = format.wire != Wire::int8_token && element % size == 0 &&
                      element < static_cast<std::uint32_t>(format.hidden);
  const std::int64_t block = element / size;
  return {writes, scale, scale_distance(format, rows, block), block};
}
__device__ inline void store_block_scale(const WireFormat& format, std::byte* blocks,
                                         std::int64_t rows, const BlockScaleOf& of) {
  if (!of.writes) return;
  store_scale(format, blocks + of.distance, of.scale);
  if (of.block + 1 < format.num_blocks) return;
  const std::int64_t places = num_scale_places(format);
  for (std::int64_t after = of.block + 1; after < places; ++after) {
    store_scale(format, blocks + scale_distance(format, rows, after), 0);
  }
}

// One warp: pieces [piece, end) of a row. sink(element, encoded) is called by all lanes, those past the
// row's end too.
template <typename C, typename Source, typename Sink>
__device__ void encode_pieces(const WireFormat& format, const Source& source, float row_scale,
                              std::uint32_t piece, std::uint32_t end, Sink sink) {
  std::uint32_t element =
      piece * C::kPieceElements + static_cast<std::uint32_t>(lane_index() * C::kElements);
  constexpr int kAhead = Source::kAhead;
  typename Source::Loaded ahead[kAhead];
#pragma unroll
  for (int i = 0; i < kAhead; ++i) ahead[i] = source.load(element + i * C::kPieceElements);
#pragma unroll 1
  for (; piece < end; ++piece) {
    typename C::Values values;
    source.widen(ahead[0], values);
#pragma unroll
    for (int i = 0; i + 1 < kAhead; ++i) ahead[i] = ahead[i + 1];
    if (piece + kAhead < end) {
      ahead[kAhead - 1] = source.load(element + kAhead * C::kPieceElements);
    }
    sink(element, encode<C>(format, values, row_scale));
    element += C::kPieceElements;
  }
}
template <typename C>
__device__ std::uint32_t num_pieces(const WireFormat& format) {
  return (static_cast<std::uint32_t>(format.hidden) + C::kPieceElements - 1) / C::kPieceElements;
}
// One warp: a whole row to one place in a window.
template <typename C, typename Source>
__device__ void encode_row(const WireFormat& format, const Source& source, std::byte* row,
                           const ScalesOfRow& scales) {
  const float of_row = row_scale<C>(format, source);
  const auto hidden = static_cast<std::uint32_t>(format.hidden);
  encode_pieces<C>(format, source, of_row, 0, num_pieces<C>(format),
                   [&](std::uint32_t element, const Encoded<C>& encoded) {
                     if (element >= hidden) return;
                     store_encoded<C>(format, row, element, encoded);
                     if (!C::kQuantised) return;
                     store_block_scale(format, scales.blocks, scales.rows,
                                       block_scale_of(format, scales.rows, element, encoded.scale));
                   });
  if (C::kQuantised && has_row_scale(format.wire) && lane_index() == 0) {
    *reinterpret_cast<float*>(scales.whole) = of_row;
  }
}

// --- Back -----------------------------------------------------------------------------------------

// low_to_float() of both codes: exact either way.
template <typename Format>
__device__ float2 low_to_floats(std::uint32_t codes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  constexpr auto kKind = Format::kMantissa == 3 ? __NV_E4M3 : __NV_E5M2;
  const __half2_raw halves =
      __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(codes), kKind);
  return __half22float2(__half2(halves));
#else
  return {low_to_float<Format>(codes & 0xFFU), low_to_float<Format>((codes >> 8) & 0xFFU)};
#endif
}
__device__ inline float float_at(const std::byte* from) {
  return *reinterpret_cast<const float*>(from);
}

__device__ inline void dequantise(const WireFormat& format, const std::byte* payload,
                                  const ScalesOfRow& scales, std::uint32_t element,
                                  float (&values)[16]) {
  const std::int64_t block = element / static_cast<std::uint32_t>(format.block);
  const std::byte* at = scales.blocks + scale_distance(format, scales.rows, block);
  if (format.wire == Wire::nvfp4) {
    const uint2 codes = __ldcs(reinterpret_cast<const uint2*>(payload + element / 2));
    const float scale =
        float_at(scales.whole) * low_to_float<E4M3>(static_cast<std::uint32_t>(*at));
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const std::uint32_t word = i < 8 ? codes.x : codes.y;
      values[i] = __fmul_rn(low_to_float<E2M1>(word >> (i % 8 * 4)), scale);
    }
    return;
  }
  const uint4 codes = __ldcs(reinterpret_cast<const uint4*>(payload + element));
  const std::uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
  const float scale = format.scale_type == ScaleType::f32
                          ? float_at(at)
                          : e8m0_to_float(static_cast<std::uint32_t>(*at));
  if (format.wire == Wire::int8_token) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const auto code = static_cast<std::int8_t>(words[i / 4] >> (i % 4 * 8));
      values[i] = __fmul_rn(static_cast<float>(code), scale);
    }
    return;
  }
  with_block_wire(format.wire, [&]<typename Format, ScaleRule>() {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float2 two = low_to_floats<Format>(words[i / 2] >> (i % 2 * 16));
      values[2 * i] = __fmul_rn(two.x, scale);
      values[2 * i + 1] = __fmul_rn(two.y, scale);
    }
  });
}

// A lane's elements, `element` < hidden, of a row in a window.
template <typename C>
__device__ void decode(const WireFormat& format, const std::byte* payload,
                       const ScalesOfRow& scales, std::uint32_t element,
                       typename C::Values& values) {
  if constexpr (C::kQuantised) {
    dequantise(format, payload, scales, element, values.of);
  } else {
    const DType dtype = plain_dtype(format.wire);
    const auto padded = static_cast<std::uint32_t>(scale_line(format.payload_bytes));
    widen_packed<C>(dtype, load_packed<C>(dtype, payload, element, padded), values);
  }
}

}  // namespace wherry::kernels::cuda
