// bf16 to Wire::e4m3_block128: one fp32 scale, amax / 448, for 128 elements. A warp takes 512
// elements, 16 a lane: 32 bytes in, 16 bytes out.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <cfloat>
#include <cstdint>

#include "kernels/cuda/choices.cuh"
#include "kernels/exact_quotient.hpp"

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

__device__ inline float near_reciprocal(float x) {
  float reciprocal;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(x));
  return reciprocal;
}

// Infinity as the largest finite value, whose code is the same; NaN stays.
__device__ inline std::uint32_t without_infinity(std::uint32_t pair) {
  const __nv_bfloat162 most = __float2bfloat162_rn(0x1.FEp127F);
  const __nv_bfloat162 value = *reinterpret_cast<const __nv_bfloat162*>(&pair);
  const __nv_bfloat162 finite = __hmax2_nan(__hmin2_nan(value, most), __hneg2(most));
  return *reinterpret_cast<const std::uint32_t*>(&finite);
}

// A lane's 16 elements of a block, their codes, and the block's scale.
struct LaneBlock {
  uint4 packed[2];
  uint4 codes;
  float scale;
};

// All lanes of a warp; lanes beyond the row pass zeros. Several blocks of 512 elements are in flight
// together. Small code matters as well: most of it runs once, from a cold cache.
template <int kBlocks>
__device__ void quantise(LaneBlock (&blocks)[kBlocks]) {
  constexpr float kLargestCode = 448.0F;
  constexpr float kSmall = 0x1p-80F;  // below, a correction would underflow
  constexpr float kRaise = 0x1p100F;
  std::uint32_t pairs[kBlocks][8];
  float largest[kBlocks];
  float divisor[kBlocks];
  bool rare = false;
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    const uint4(&packed)[2] = blocks[b].packed;
    for (int i = 0; i < 2; ++i) {
      pairs[b][4 * i] = packed[i].x;
      pairs[b][4 * i + 1] = packed[i].y;
      pairs[b][4 * i + 2] = packed[i].z;
      pairs[b][4 * i + 3] = packed[i].w;
    }
    largest[b] = largest_magnitude(pairs[b]);
  }
#pragma unroll
  for (int distance = kLanesPerBlock / 2; distance > 0; distance /= 2) {
#pragma unroll
    for (float& each : largest) {
      each = fmaxf(each, __shfl_xor_sync(kAllLanes, each, distance));
    }
  }
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    divisor[b] = blocks[b].scale = largest[b] == 0.0F ? 1.0F : e4m3_scale(largest[b]);
    rare = rare || largest[b] > FLT_MAX || (largest[b] < kSmall && largest[b] != 0.0F);
  }
  // Rare, and seldom fetched: rows with infinity, or so small that they are raised first (exactly).
  if (__any_sync(kAllLanes, rare)) {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      if (largest[b] == 0.0F) continue;
      const float raise = largest[b] < kSmall ? kRaise : 1.0F;
      blocks[b].scale = __fdiv_rn(fminf(largest[b], FLT_MAX), kLargestCode);
      divisor[b] = __fmul_rn(blocks[b].scale, raise);
      for (std::uint32_t& pair : pairs[b]) {
        const std::uint32_t finite = without_infinity(pair);
        pair = __float_as_uint(__fmul_rn(bf16_low(finite), raise)) >> 16 |
               (__float_as_uint(__fmul_rn(bf16_high(finite), raise)) & 0xFFFF0000U);
      }
    }
  }
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    const SplitReciprocal by = split_reciprocal(divisor[b], near_reciprocal(divisor[b]));
    std::uint32_t codes[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float2 two = {near_quotient_by(by, bf16_low(pairs[b][i])),
                          near_quotient_by(by, bf16_high(pairs[b][i]))};
      codes[i] = __nv_cvt_float2_to_fp8x2(two, __NV_SATFINITE, __NV_E4M3);
    }
    blocks[b].codes = {codes[0] | (codes[1] << 16), codes[2] | (codes[3] << 16),
                       codes[4] | (codes[5] << 16), codes[6] | (codes[7] << 16)};
  }
}

// The 16 elements of a lane; `x` is this lane's first.
__device__ inline void load_elements(const std::byte* x, uint4 (&packed)[2]) {
  const auto* from = reinterpret_cast<const uint4*>(x);
  packed[0] = __ldcs(from);
  packed[1] = __ldcs(from + 1);
}

}  // namespace wherry::kernels::cuda
