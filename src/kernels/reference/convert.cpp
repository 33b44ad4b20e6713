// Conversions between rows and wire formats, element by element: the definition that every other
// kernel must equal bit by bit.
#include <algorithm>
#include <cstring>

#include "kernels/numerics_low.hpp"
#include "kernels/reference/convert_blocks.hpp"
#include "kernels/reference/elements.hpp"
#include "kernels/reference/reference.hpp"
#include "kernels/wires.hpp"

namespace wherry::kernels::reference {

namespace {

template <DType kDType>
using Stored = typename Element<kDType>::Stored;

template <DType kDType>
void put(std::byte* x, std::int64_t i, float value) noexcept {
  reinterpret_cast<Stored<kDType>*>(x)[i] = Element<kDType>::store(value);
}

// ---- Unquantised ---------------------------------------------------------------------------------

template <DType kFrom, DType kTo>
Stored<kTo> converted(Stored<kFrom> value) noexcept {
  if constexpr (kFrom == DType::f64 && kTo == DType::bf16) return double_to_bf16(value);
  if constexpr (kFrom == DType::f64 && kTo == DType::f16) return double_to_f16(value);
  const auto wide = Element<kFrom>::load(value);
  return Element<kTo>::store(static_cast<typename Element<kTo>::Sum>(wide));
}

template <DType kFrom, DType kTo>
void convert_row(const std::byte* from, std::byte* to, std::int64_t hidden) noexcept {
  const auto* in = reinterpret_cast<const Stored<kFrom>*>(from);
  auto* out = reinterpret_cast<Stored<kTo>*>(to);
  for (std::int64_t i = 0; i < hidden; ++i) out[i] = converted<kFrom, kTo>(in[i]);
}

void plain_row(DType from_dtype, DType to_dtype, const std::byte* from, std::byte* to,
               std::int64_t hidden) {
  if (from_dtype == to_dtype) {
    std::memcpy(to, from, static_cast<std::size_t>(hidden * dtype_bytes(from_dtype)));
    return;
  }
  with_element(from_dtype, [&]<DType kFrom>() {
    with_element(to_dtype, [&]<DType kTo>() { convert_row<kFrom, kTo>(from, to, hidden); });
  });
}

// ---- nvfp4 ---------------------------------------------------------------------------------------

template <DType kDType>
void quantize_nvfp4(const WireFormat& format, const std::byte* x, std::byte* payload,
                    std::byte* scales) noexcept {
  const Row<kDType> row(x);
  std::uint32_t row_amax = 0;
  for (std::int64_t i = 0; i < format.hidden; ++i) {
    row_amax = std::max(row_amax, finite_magnitude_bits(row[i]));
  }
  const float row_scale = nvfp4_row_scale(row_amax);
  put_float(scales + format.scale_bytes - 4, row_scale);
  std::memset(payload, 0, static_cast<std::size_t>(format.payload_bytes));
  for (std::int64_t block = 0; block < format.num_blocks; ++block) {
    const std::int64_t begin = block * format.block;
    const std::int64_t end = std::min(begin + format.block, format.hidden);
    std::uint32_t amax = 0;
    for (std::int64_t i = begin; i < end; ++i) amax = std::max(amax, magnitude_bits(row[i]));
    const std::uint8_t code = nvfp4_block_scale(amax, row_scale);
    scales[block] = std::byte{code};
    const float scale = row_scale * low_to_float<E4M3>(code);
    for (std::int64_t i = begin; i < end; ++i) {
      payload[i / 2] |= std::byte{nvfp4_encode(row[i], scale)} << (i % 2 * 4);
    }
  }
  std::fill(scales + format.num_blocks, scales + format.scale_bytes - 4, std::byte{0});
}

template <DType kDType>
void dequantize_nvfp4(const WireFormat& format, const std::byte* payload, const std::byte* scales,
                      std::byte* x) noexcept {
  const float row_scale = get_float(scales + format.scale_bytes - 4);
  for (std::int64_t i = 0; i < format.hidden; ++i) {
    const auto code = std::to_integer<std::uint32_t>(payload[i / 2] >> (i % 2 * 4));
    const auto block = std::to_integer<std::uint32_t>(scales[i / format.block]);
    const float scale = row_scale * low_to_float<E4M3>(block);
    put<kDType>(x, i, low_to_float<E2M1>(code) * scale);
  }
}

// ---- int8_token ----------------------------------------------------------------------------------

template <DType kDType>
void dequantize_int8(const WireFormat& format, const std::byte* payload, const std::byte* scales,
                     std::byte* x) noexcept {
  const float scale = get_float(scales);
  for (std::int64_t i = 0; i < format.hidden; ++i) {
    const auto code = static_cast<std::int8_t>(payload[i]);
    put<kDType>(x, i, static_cast<float>(code) * scale);
  }
}

}  // namespace

void quantize_row(const WireFormat& format, const std::byte* x, std::byte* payload,
                  std::byte* scales) {
  if (!format.quantised()) {
    plain_row(format.dtype, plain_dtype(format.wire), x, payload, format.hidden);
    return;
  }
  with_element(format.dtype, [&]<DType kDType>() {
    if constexpr (kDType != DType::f64) {
      if (format.wire == Wire::nvfp4) return quantize_nvfp4<kDType>(format, x, payload, scales);
      if (format.wire == Wire::int8_token) return quantize_int8<kDType>(format, x, payload, scales);
      with_block_wire(format.wire, [&]<typename Format, ScaleRule kRule>() {
        for (std::int64_t block = 0; block < format.num_blocks; ++block) {
          quantize_block<kDType, Format, kRule>(format, x, payload, scales, block);
        }
      });
    }
  });
}

void dequantize_row(const WireFormat& format, const std::byte* payload, const std::byte* scales,
                    std::byte* x) {
  if (!format.quantised()) {
    plain_row(plain_dtype(format.wire), format.dtype, payload, x, format.hidden);
    return;
  }
  with_element(format.dtype, [&]<DType kDType>() {
    if constexpr (kDType != DType::f64) {
      if (format.wire == Wire::nvfp4) return dequantize_nvfp4<kDType>(format, payload, scales, x);
      if (format.wire == Wire::int8_token) {
        return dequantize_int8<kDType>(format, payload, scales, x);
      }
      with_block_wire(format.wire, [&]<typename Format, ScaleRule>() {
        dequantize_blocks<kDType, Format>(format, payload, scales, x, 0, format.hidden);
      });
    }
  });
}

}  // namespace wherry::kernels::reference
