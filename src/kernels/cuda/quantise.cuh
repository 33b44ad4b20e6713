// bf16 to Wire::e4m3_block128: one fp32 scale, amax / 448, for 128 elements. A warp takes 512
// elements, 16 a lane: 32 bytes in, 16 bytes out.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <cfloat>
#include <cstdint>

#include "kernels/cuda/choices.cuh"

namespace wherry::kernels::cuda {

inline constexpr int kBlockElements = 128;  // that share a scale
inline constexpr int kLaneElements = 16;
inline constexpr int kLanesPerBlock = kBlockElements / kLaneElements;
inline constexpr int kPieceElements = kWarpLanes * kLaneElements;

__device__ inline float bf16_low(std::uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ inline float bf16_high(std::uint32_t pair) {
  return __uint_as_float(pair & 0xFFFF0000U);
}

// The largest magnitude of the pairs, without NaN, which does not spread to its block.
__device__ inline float largest_magnitude(const std::uint32_t (&pairs)[8]) {
  __nv_bfloat162 largest = __float2bfloat162_rn(0.0F);
#pragma unroll
  for (const std::uint32_t& pair : pairs) {
    largest = __hmax2(largest, __habs2(*reinterpret_cast<const __nv_bfloat162*>(&pair)));
  }
  return fmaxf(__low2float(largest), __high2float(largest));
}

// x / scale to the code it rounds to. The exact quotient takes four times the instructions of the
// product with the reciprocal and one correction, and for bf16 both give the same code: tried for all
// mantissas of x and of amax and all distances of their exponents. Not with the product alone. The
// correction is written so that -0 stays -0.
struct Quotient {
  float scale, reciprocal;
  __device__ float operator()(float x) const {
    const float near = __fmul_rn(x, reciprocal);
    return __fmaf_rn(__fmaf_rn(scale, near, -x), -reciprocal, near);
  }
};

template <typename Divide>
__device__ uint4 encode_e4m3(const std::uint32_t (&pairs)[8], Divide divide) {
  std::uint32_t codes[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 low = {divide(bf16_low(pairs[2 * i])), divide(bf16_high(pairs[2 * i]))};
    const float2 high = {divide(bf16_low(pairs[2 * i + 1])), divide(bf16_high(pairs[2 * i + 1]))};
    const std::uint32_t low_bits = __nv_cvt_float2_to_fp8x2(low, __NV_SATFINITE, __NV_E4M3);
    const std::uint32_t high_bits = __nv_cvt_float2_to_fp8x2(high, __NV_SATFINITE, __NV_E4M3);
    codes[i] = low_bits | (high_bits << 16);
  }
  return {codes[0], codes[1], codes[2], codes[3]};
}

// All lanes of a warp; lanes beyond the row pass zeros.
__device__ inline uint4 quantise(const uint4 (&packed)[2], float& scale) {
  constexpr float kLargestCode = 448.0F;
  constexpr float kSmallestFast = 0x1p-80F;  // below, a correction would underflow
  const std::uint32_t pairs[8] = {packed[0].x, packed[0].y, packed[0].z, packed[0].w,
                                  packed[1].x, packed[1].y, packed[1].z, packed[1].w};
  float largest = largest_magnitude(pairs);
#pragma unroll
  for (int distance = kLanesPerBlock / 2; distance > 0; distance /= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, distance));
  }
  // Infinity counts as the largest finite value.
  scale = largest == 0.0F ? 1.0F : __fdiv_rn(fminf(largest, FLT_MAX), kLargestCode);
  if (largest >= kSmallestFast && largest <= FLT_MAX) {
    return encode_e4m3(pairs, Quotient{scale, __fdiv_rn(1.0F, scale)});
  }
  return encode_e4m3(pairs, [&](float x) { return __fdiv_rn(x, scale); });
}

// The 16 elements of a lane; `x` is this lane's first.
__device__ inline void load_elements(const std::byte* x, uint4 (&packed)[2]) {
  const auto* from = reinterpret_cast<const uint4*>(x);
  packed[0] = __ldcs(from);
  packed[1] = __ldcs(from + 1);
}

}  // namespace wherry::kernels::cuda
