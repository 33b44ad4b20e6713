// Conversions between rows and wire formats by vectors: every wire of 8 bits. The others (nvfp4, and
// the unquantised ones, which are copies but for a change of dtype) are the reference's.
#include "kernels/cpu/targets.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/convert.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "kernels/cpu/convert-inl.hpp"
#include "kernels/cpu/cpu.hpp"
#include "kernels/reference/reference.hpp"

HWY_BEFORE_NAMESPACE();
namespace wherry::kernels::cpu {
namespace HWY_NAMESPACE {

// Calls fn.template operator()<kDType>() for the dtypes that have quantised wires.
template <typename Fn>
void with_dtype(DType dtype, Fn fn) {
  switch (dtype) {
    case DType::bf16: return fn.template operator()<DType::bf16>();
    case DType::f16: return fn.template operator()<DType::f16>();
    case DType::f32: return fn.template operator()<DType::f32>();
    case DType::f64:
    case DType::raw: return;  // wire_format() allows neither
  }
}

HWY_ATTR void quantize_row(const WireFormat& format, const std::byte* x, std::byte* payload,
                           std::byte* scales) {
  if (!format.quantised() || format.wire == Wire::nvfp4) {
    return reference::quantize_row(format, x, payload, scales);
  }
  with_dtype(format.dtype, [&]<DType kDType>() {
    if (format.wire == Wire::int8_token) return quantize_int8<kDType>(format, x, payload, scales);
    with_block_wire(format.wire, [&]<typename Format, ScaleRule kRule>() {
      quantize_blocks<kDType, Format, kRule>(format, x, payload, scales);
    });
  });
}

HWY_ATTR void dequantize_row(const WireFormat& format, const std::byte* payload,
                             const std::byte* scales, std::byte* x) {
  if (!format.quantised() || format.wire == Wire::nvfp4) {
    return reference::dequantize_row(format, payload, scales, x);
  }
  with_dtype(format.dtype, [&]<DType kDType>() {
    if (format.wire == Wire::int8_token) return dequantize_int8<kDType>(format, payload, scales, x);
    with_block_wire(format.wire, [&]<typename Format, ScaleRule>() {
      dequantize_blocks<kDType, Format>(format, payload, scales, x);
    });
  });
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace wherry::kernels::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace wherry::kernels::cpu {

HWY_EXPORT(quantize_row);
HWY_EXPORT(dequantize_row);

QuantizeRowFn quantize_row_for(std::int64_t target) {
  return WHERRY_FOR_TARGET(quantize_row, target);
}
DequantizeRowFn dequantize_row_for(std::int64_t target) {
  return WHERRY_FOR_TARGET(dequantize_row, target);
}

}  // namespace wherry::kernels::cpu
#endif
