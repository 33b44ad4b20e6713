// How combine reads and writes 16 bytes of each type of row: widened to the type of sums (fp32; fp64 for
// f64 rows) exactly; rounded once, to nearest even, without flush of subnormals; a NaN leaves as the one
// NaN of the type.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "wherry/types.hpp"

namespace wherry::kernels::cuda {

template <typename Pair>
__device__ std::uint32_t bits_of(const Pair& pair) {
  static_assert(sizeof(Pair) == sizeof(std::uint32_t));
  return *reinterpret_cast<const std::uint32_t*>(&pair);
}
// The hardware's NaN is 0x7FFF in both 16-bit types, ours is not: halves that are it get replaced.
template <std::uint32_t kNan>
__device__ std::uint32_t with_our_nan(std::uint32_t pair) {
  constexpr std::uint32_t kTheirs = 0x7FFFU;
  constexpr std::uint32_t kDifference = kTheirs ^ kNan;
  if ((pair & 0xFFFFU) == kTheirs) pair ^= kDifference;
  if ((pair >> 16) == kTheirs) pair ^= kDifference << 16;
  return pair;
}

// Rounds vectors of eight values, two an instruction. NaN is rare, so one look tells whether there is any: the sum of
// all pairs (which may be one without, of infinities). No array of pairs: one has been left in local memory, where
// each store to it takes as long as one to the row.
template <std::uint32_t kNan, typename Pair, int kVectors, typename RoundPair>
__device__ void round_pairs(const float (&sum)[kVectors][8], uint4 (&rounded)[kVectors],
                            RoundPair round_pair) {
  Pair total;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const Pair x = round_pair(sum[v][0], sum[v][1]);
    const Pair y = round_pair(sum[v][2], sum[v][3]);
    const Pair z = round_pair(sum[v][4], sum[v][5]);
    const Pair w = round_pair(sum[v][6], sum[v][7]);
    const Pair here = __hadd2(__hadd2(x, y), __hadd2(z, w));
    total = v == 0 ? here : __hadd2(total, here);
    rounded[v] = {bits_of(x), bits_of(y), bits_of(z), bits_of(w)};
  }
  if (__hbeq2(total, total)) return;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    rounded[v] = {with_our_nan<kNan>(rounded[v].x), with_our_nan<kNan>(rounded[v].y),
                  with_our_nan<kNan>(rounded[v].z), with_our_nan<kNan>(rounded[v].w)};
  }
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
  template <int kVectors>
  static __device__ void round(const float (&sum)[kVectors][kOfVector],
                               uint4 (&rounded)[kVectors]) {
    round_pairs<0x7FC0, __nv_bfloat162>(
        sum, rounded, [](float low, float high) { return __floats2bfloat162_rn(low, high); });
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
  template <int kVectors>
  static __device__ void round(const float (&sum)[kVectors][kOfVector],
                               uint4 (&rounded)[kVectors]) {
    round_pairs<0x7E00, __half2>(
        sum, rounded, [](float low, float high) { return __floats2half2_rn(low, high); });
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
  template <int kVectors>
  static __device__ void round(const float (&sum)[kVectors][kOfVector],
                               uint4 (&rounded)[kVectors]) {
    const auto one = [](float value) {
      return value != value ? 0x7FC00000U : __float_as_uint(value);
    };
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      rounded[v] = {one(sum[v][0]), one(sum[v][1]), one(sum[v][2]), one(sum[v][3])};
    }
  }
};

struct F64Element {
  static constexpr int kBytes = 8;
  static constexpr int kOfVector = 2;
  static __device__ void widen(const uint4& packed, double (&values)[kOfVector]) {
    values[0] = __hiloint2double(static_cast<int>(packed.y), static_cast<int>(packed.x));
    values[1] = __hiloint2double(static_cast<int>(packed.w), static_cast<int>(packed.z));
  }
  template <int kVectors>
  static __device__ void round(const double (&sum)[kVectors][kOfVector],
                               uint4 (&rounded)[kVectors]) {
    const auto low = [](double value) {
      return value != value ? 0U : static_cast<std::uint32_t>(__double2loint(value));
    };
    const auto high = [](double value) {
      return value != value ? 0x7FF80000U : static_cast<std::uint32_t>(__double2hiint(value));
    };
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      rounded[v] = {low(sum[v][0]), high(sum[v][0]), low(sum[v][1]), high(sum[v][1])};
    }
  }
};

// One vector.
template <typename Element, typename Total>
__device__ uint4 round_vector(const Total (&sum)[Element::kOfVector]) {
  uint4 rounded[1];
  Element::round(reinterpret_cast<const Total(&)[1][Element::kOfVector]>(sum), rounded);
  return rounded[0];
}

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
