// Sums of bf16 rows in fp32, the arithmetic of combine: a warp sums one token, or a part of one.
// The terms' addresses wait in shared memory, where all lanes read them at once: keeping eight
// pointers and weights in registers leaves too few of them for the rows in flight.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/cuda/choices.cuh"
#include "kernels/numerics.hpp"

namespace wherry::kernels::cuda {

inline constexpr int kSumThreads = 1024;
inline constexpr int kSumWarps = kSumThreads / kWarpLanes;
inline constexpr int kRowsInFlight = 8;
inline constexpr int kVectorElements = 8;  // bf16 elements of a 16-byte load

struct Term {
  const std::byte* row;
  float weight;
};
using WarpTerms = Term[kMaxTopk];

// Puts this lane's term in place `order` of its warp's list.
__device__ inline void put_term(WarpTerms& terms, bool present, int order, const std::byte* row,
                                float weight) {
  __syncwarp();  // the list's last readers are done
  if (present) terms[order] = {row, weight};
  __syncwarp();
}

// Plain sums add 0 + a + b ...; weighted ones fuse the multiplication, as the contract says.
template <bool kWeighted>
__device__ void add_term(float (&sum)[kVectorElements], const uint4& packed, float weight) {
  const std::uint32_t pairs[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float low = __uint_as_float(pairs[i] << 16);
    const float high = __uint_as_float(pairs[i] & 0xFFFF0000U);
    if constexpr (kWeighted) {
      sum[2 * i] = __fmaf_rn(weight, low, sum[2 * i]);
      sum[2 * i + 1] = __fmaf_rn(weight, high, sum[2 * i + 1]);
    } else {
      sum[2 * i] = __fadd_rn(sum[2 * i], low);
      sum[2 * i + 1] = __fadd_rn(sum[2 * i + 1], high);
    }
  }
}

// Rounds to nearest even. The instruction does that for two values at once, with another NaN than
// ours: a total that is NaN (rare) takes the slow way.
__device__ inline uint4 round_to_bf16(const float (&sum)[kVectorElements]) {
  float total = sum[0];
#pragma unroll
  for (int i = 1; i < kVectorElements; ++i) total += sum[i];
  std::uint32_t pairs[4];
  if (total == total) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(sum[2 * i], sum[2 * i + 1]);
      pairs[i] = *reinterpret_cast<const std::uint32_t*>(&pair);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      pairs[i] = static_cast<std::uint32_t>(float_to_bf16(sum[2 * i])) |
                 (static_cast<std::uint32_t>(float_to_bf16(sum[2 * i + 1])) << 16);
    }
  }
  return {pairs[0], pairs[1], pairs[2], pairs[3]};
}

// Writes what lies inside a row whose end or address is no multiple of 16 bytes.
__device__ inline void store_odd(std::byte* out, std::uint32_t vector, const uint4& packed,
                                 std::uint32_t row_bytes) {
  const std::uint32_t pairs[4] = {packed.x, packed.y, packed.z, packed.w};
  auto* elements = reinterpret_cast<std::uint16_t*>(out);
  const std::uint32_t num_elements = row_bytes / 2;
#pragma unroll
  for (int i = 0; i < kVectorElements; ++i) {
    const std::uint32_t at = vector * kVectorElements + static_cast<std::uint32_t>(i);
    if (at < num_elements) {
      elements[at] = static_cast<std::uint16_t>(pairs[i / 2] >> (i % 2 == 0 ? 0 : 16));
    }
  }
}

// One warp: out[first_vector, end_vector) = the sum of `count` terms, in the order of the list.
// Rows in windows begin and end on 16 bytes; `out` need not (aligned = false).
template <bool kWeighted>
__device__ void sum_rows(const WarpTerms& terms, int count, std::byte* out, bool aligned,
                         std::uint32_t row_bytes, std::uint32_t first_vector,
                         std::uint32_t end_vector, int lane) {
  for (std::uint32_t vector = first_vector + static_cast<std::uint32_t>(lane);
       vector < end_vector; vector += kWarpLanes) {
    float sum[kVectorElements] = {};
    for (int base = 0; base < count; base += kRowsInFlight) {
      uint4 loaded[kRowsInFlight];
#pragma unroll
      for (int i = 0; i < kRowsInFlight; ++i) {
        if (base + i < count) {
          loaded[i] = __ldcs(reinterpret_cast<const uint4*>(terms[base + i].row) + vector);
        }
      }
#pragma unroll
      for (int i = 0; i < kRowsInFlight; ++i) {
        if (base + i < count) {
          add_term<kWeighted>(sum, loaded[i], kWeighted ? terms[base + i].weight : 1.0F);
        }
      }
    }
    const uint4 rounded = round_to_bf16(sum);
    if (aligned) {
      __stcs(reinterpret_cast<uint4*>(out) + vector, rounded);
    } else {
      store_odd(out, vector, rounded, row_bytes);
    }
  }
}

}  // namespace wherry::kernels::cuda
