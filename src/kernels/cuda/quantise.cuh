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

// Infinity as the largest finite value, whose code is the same; NaN stays.
__device__ inline std::uint32_t without_infinity(std::uint32_t pair) {
  const __nv_bfloat162 most = __float2bfloat162_rn(0x1.FEp127F);
  const __nv_bfloat162 value = *reinterpret_cast<const __nv_bfloat162*>(&pair);
  const __nv_bfloat162 finite = __hmax2_nan(__hmin2_nan(value, most), __hneg2(most));
  return *reinterpret_cast<const std::uint32_t*>(&finite);
}

// All lanes of a warp; lanes beyond the row pass zeros.
//
// The exact quotient takes four times the instructions of the product with the reciprocal and one
// correction, and for bf16 both give the same code: tried for all x and amax at both ends of fp32 and
// for all mantissas and distances of exponents between. Not with the product alone. The correction is
// written so that -0 stays -0. Small code matters as well: most of it runs once, from a cold cache.
__device__ inline uint4 quantise(const uint4 (&packed)[2], float& scale) {
  constexpr float kLargestCode = 448.0F;
  constexpr float kSmall = 0x1p-80F;  // below, a correction would underflow
  constexpr float kRaise = 0x1p100F;
  std::uint32_t pairs[8] = {packed[0].x, packed[0].y, packed[0].z, packed[0].w,
                            packed[1].x, packed[1].y, packed[1].z, packed[1].w};
  float largest = largest_magnitude(pairs);
#pragma unroll
  for (int distance = kLanesPerBlock / 2; distance > 0; distance /= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, distance));
  }
  scale = largest == 0.0F ? 1.0F : __fdiv_rn(fminf(largest, FLT_MAX), kLargestCode);
  float divisor = scale;
  // Rare, and seldom fetched: rows with infinity, or so small that they are raised first (exactly).
  const bool small = largest < kSmall && largest != 0.0F;
  if (__any_sync(kAllLanes, small || largest > FLT_MAX)) {
    const float raise = small ? kRaise : 1.0F;
    divisor = __fmul_rn(scale, raise);
#pragma unroll
    for (std::uint32_t& pair : pairs) {
      const std::uint32_t finite = without_infinity(pair);
      pair = __float_as_uint(__fmul_rn(bf16_low(finite), raise)) >> 16 |
             (__float_as_uint(__fmul_rn(bf16_high(finite), raise)) & 0xFFFF0000U);
    }
  }
  const float reciprocal = __fdiv_rn(1.0F, divisor);
  const auto divide = [&](float x) {
    const float near = __fmul_rn(x, reciprocal);
    return __fmaf_rn(__fmaf_rn(divisor, near, -x), -reciprocal, near);
  };
  std::uint32_t codes[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float2 two = {divide(bf16_low(pairs[i])), divide(bf16_high(pairs[i]))};
    codes[i] = __nv_cvt_float2_to_fp8x2(two, __NV_SATFINITE, __NV_E4M3);
  }
  return {codes[0] | (codes[1] << 16), codes[2] | (codes[3] << 16), codes[4] | (codes[5] << 16),
          codes[6] | (codes[7] << 16)};
}

// The 16 elements of a lane; `x` is this lane's first.
__device__ inline void load_elements(const std::byte* x, uint4 (&packed)[2]) {
  const auto* from = reinterpret_cast<const uint4*>(x);
  packed[0] = __ldcs(from);
  packed[1] = __ldcs(from + 1);
}

}  // namespace wherry::kernels::cuda
