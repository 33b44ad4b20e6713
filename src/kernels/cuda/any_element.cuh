// Rows of any dtype, which is known at run time only: what a lane reads and writes of them where rows are
// converted. A warp takes a piece of a row at a time: 16 elements a lane where rows are quantised, so that
// each lane lies within one block and has 16 bytes to write, and 8 where they change their dtype. Elements
// past the end of a row are zeros when they are read.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/cuda/choices.cuh"
#include "kernels/cuda/elements.cuh"
#include "kernels/cuda/row_sum.cuh"
#include "kernels/numerics.hpp"

namespace wherry::kernels::cuda {

// ValueType: of sums, fp32, or fp64 for f64 rows. kOfLane: vectors of 16 bytes that a lane's elements take in
// the rows' dtype; 2 where these are known to be no wider than that.
template <typename ValueType, bool kIsQuantised, int kOfLane = 4>
struct Codec {
  using Value = ValueType;
  static constexpr bool kQuantised = kIsQuantised;
  static constexpr int kElements = kIsQuantised ? 16 : 8;
  static constexpr int kVectors = kOfLane;
  static constexpr int kUnits = kIsQuantised ? 1 : 4;  // of 16 bytes that a lane writes, at most
  static constexpr std::uint32_t kPieceElements = kWarpLanes * kElements;
  struct Values {
    Value of[kElements];
  };
};

template <typename Element>
using ValueOf = std::conditional_t<Element::kBytes == 8, double, float>;
// Words of f64 need no more alignment than those of f32.
template <typename Element>
using Loadable = std::conditional_t<Element::kBytes == 8, F32Element, Element>;

// Calls fn.template operator()<Element>() for the dtype; nothing for raw.
template <typename Fn>
__device__ void with_element_of(DType dtype, Fn fn) {
  switch (dtype) {
    case DType::bf16: fn.template operator()<Bf16Element>(); return;
    case DType::f16: fn.template operator()<F16Element>(); return;
    case DType::f32: fn.template operator()<F32Element>(); return;
    case DType::f64: fn.template operator()<F64Element>(); return;
    case DType::raw: return;
  }
}
// Quantised rows, for one, are never f64.
template <typename C, typename Element>
inline constexpr bool kTakes = C::kElements * Element::kBytes <= 16 * C::kVectors;

__device__ inline std::uint32_t bytes_of(DType dtype) {
  switch (dtype) {
    case DType::bf16:
    case DType::f16: return 2;
    case DType::f32: return 4;
    case DType::f64: return 8;
    case DType::raw: break;
  }
  return 1;
}

// A lane's elements as they are stored.
template <typename C>
struct Packed {
  uint4 vector[C::kVectors];
};
template <typename C>
__device__ Packed<C> load_packed(DType dtype, const std::byte* row, std::uint32_t element,
                                 std::uint32_t row_bytes) {
  Packed<C> packed{};
  with_element_of(dtype, [&]<typename Element>() {
    if constexpr (kTakes<C, Element>) {
      constexpr int kVectors = C::kElements / Element::kOfVector;
      const std::uint32_t first = element / Element::kOfVector;
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        packed.vector[i] = load_odd<Loadable<Element>>(row, first + i, row_bytes);
      }
    }
  });
  return packed;
}
template <typename C>
__device__ void widen_packed(DType dtype, const Packed<C>& packed, typename C::Values& values) {
  with_element_of(dtype, [&]<typename Element>() {
    if constexpr (kTakes<C, Element>) {
      constexpr int kOfVector = Element::kOfVector;
#pragma unroll
      for (int i = 0; i < C::kElements / kOfVector; ++i) {
        ValueOf<Element> part[kOfVector];
        Element::widen(packed.vector[i], part);
#pragma unroll
        for (int j = 0; j < kOfVector; ++j) {
          values.of[i * kOfVector + j] = static_cast<typename C::Value>(part[j]);
        }
      }
    }
  });
}
template <typename Element, typename Value>
__device__ ValueOf<Element> narrowed(Value value) {
  // Two roundings, of which the first must leave a trace for the second.
  if constexpr (std::is_same_v<Value, double> && Element::kBytes == 2) {
    return double_to_float_odd(value);
  } else {
    return static_cast<ValueOf<Element>>(value);
  }
}
// Rounds a lane's elements to `Element`; put(i, vector i).
template <typename C, typename Element, typename Put>
__device__ void round_values(const typename C::Values& values, Put put) {
  constexpr int kOfVector = Element::kOfVector;
#pragma unroll
  for (int i = 0; i < C::kElements / kOfVector; ++i) {
    ValueOf<Element> part[kOfVector];
#pragma unroll
    for (int j = 0; j < kOfVector; ++j) {
      part[j] = narrowed<Element>(values.of[i * kOfVector + j]);
    }
    put(i, round_vector<Element>(part));
  }
}
// To a row of the caller's, wherever it lies.
template <typename C>
__device__ void store_values(DType dtype, std::byte* row, std::uint32_t element,
                             std::uint32_t row_bytes, const typename C::Values& values) {
  with_element_of(dtype, [&]<typename Element>() {
    if constexpr (kTakes<C, Element>) {
      const std::uint32_t first = element / Element::kOfVector;
      const bool aligned = reinterpret_cast<std::uintptr_t>(row) % 16 == 0;
      round_values<C, Element>(values, [&](int i, const uint4& rounded) {
        const std::uint32_t vector = first + static_cast<std::uint32_t>(i);
        if (aligned && (vector + 1) * 16 <= row_bytes) {
          reinterpret_cast<uint4*>(row)[vector] = rounded;
        } else {
          store_odd<Loadable<Element>>(row, vector, rounded, row_bytes);
        }
      });
    }
  });
}

}  // namespace wherry::kernels::cuda
