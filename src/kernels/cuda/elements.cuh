// How combine reads and writes 16 bytes of each type of row: widened to the type of sums (fp32; fp64 for
// f64 rows) exactly; rounded once, to nearest even, without flush of subnormals; a NaN leaves as the one
// NaN of the type.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "wherry/types.hpp"

namespace wherry::kernels::cuda {

// The hardware's NaN is 0x7FFF in both 16-bit types, ours is not: halves that are it get replaced.
template <std::uint32_t kNan>
__device__ std::uint32_t with_our_nan(std::uint32_t pair) {
  constexpr std::uint32_t kTheirs = 0x7FFFU;
  constexpr std::uint32_t kDifference = kTheirs ^ kNan;
  if ((pair & 0xFFFFU) == kTheirs) pair ^= kDifference;
  if ((pair >> 16) == kTheirs) pair ^= kDifference << 16;
  return pair;
}

// Rounds eight values, two an instruction. If one of them may be NaN (rare), it looks at all.
template <std::uint32_t kNan, typename RoundPair>
__device__ uint4 round_pairs(const float (&sum)[8], RoundPair round_pair) {
  float total = sum[0];
  std::uint32_t pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    pairs[i] = round_pair(sum[2 * i], sum[2 * i + 1]);
    if (i > 0) total += sum[2 * i];
    total += sum[2 * i + 1];
  }
  if (total != total) {
#pragma unroll
    for (std::uint32_t& pair : pairs) pair = with_our_nan<kNan>(pair);
  }
  return {pairs[0], pairs[1], pairs[2], pairs[3]};
}

struct Bf16Element {
  static constexpr int kBytes = 2;
  static constexpr int kOfVector = 8;
  static __device__ void widen(const uint4& packed, float (&values)[kOfVector]) {
    const std::uint32_t pairs[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      values[2 * i] = __uint_as_float(pairs[i] << 16);
      values[2 * i + 1] = __uint_as_float(pairs[i] & 0xFFFF0000U);
    }
  }
  static __device__ uint4 round(const float (&sum)[kOfVector]) {
    return round_pairs<0x7FC0>(sum, [](float low, float high) {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
      return *reinterpret_cast<const std::uint32_t*>(&pair);
    });
  }
};

struct F16Element {
  static constexpr int kBytes = 2;
  static constexpr int kOfVector = 8;
  static __device__ void widen(const uint4& packed, float (&values)[kOfVector]) {
    const std::uint32_t pairs[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 two = __half22float2(*reinterpret_cast<const __half2*>(&pairs[i]));
      values[2 * i] = two.x;
      values[2 * i + 1] = two.y;
    }
  }
  static __device__ uint4 round(const float (&sum)[kOfVector]) {
    return round_pairs<0x7E00>(sum, [](float low, float high) {
      const __half2 pair = __floats2half2_rn(low, high);
      return *reinterpret_cast<const std::uint32_t*>(&pair);
    });
  }
};

struct F32Element {
  static constexpr int kBytes = 4;
  static constexpr int kOfVector = 4;
  static __device__ void widen(const uint4& packed, float (&values)[kOfVector]) {
    values[0] = __uint_as_float(packed.x);
    values[1] = __uint_as_float(packed.y);
    values[2] = __uint_as_float(packed.z);
    values[3] = __uint_as_float(packed.w);
  }
  static __device__ uint4 round(const float (&sum)[kOfVector]) {
    const auto one = [](float value) {
      return value != value ? 0x7FC00000U : __float_as_uint(value);
    };
    return {one(sum[0]), one(sum[1]), one(sum[2]), one(sum[3])};
  }
};

struct F64Element {
  static constexpr int kBytes = 8;
  static constexpr int kOfVector = 2;
  static __device__ void widen(const uint4& packed, double (&values)[kOfVector]) {
    values[0] = __hiloint2double(static_cast<int>(packed.y), static_cast<int>(packed.x));
    values[1] = __hiloint2double(static_cast<int>(packed.w), static_cast<int>(packed.z));
  }
  static __device__ uint4 round(const double (&sum)[kOfVector]) {
    const auto low = [](double value) {
      return value != value ? 0U : static_cast<std::uint32_t>(__double2loint(value));
    };
    const auto high = [](double value) {
      return value != value ? 0x7FF80000U : static_cast<std::uint32_t>(__double2hiint(value));
    };
    return {low(sum[0]), high(sum[0]), low(sum[1]), high(sum[1])};
  }
};

// launch.operator()<Element>() for rows of `dtype`. f64 has kernels of its own, raw rows have no sums.
template <typename Launch>
cudaError_t with_element(DType dtype, Launch launch) {
  switch (dtype) {
    case DType::bf16: return launch.template operator()<Bf16Element>();
    case DType::f16: return launch.template operator()<F16Element>();
    case DType::f32: return launch.template operator()<F32Element>();
    case DType::f64:
    case DType::raw: break;
  }
  return cudaErrorInvalidValue;
}

}  // namespace wherry::kernels::cuda
