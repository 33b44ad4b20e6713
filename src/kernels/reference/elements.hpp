// How the reference kernels read and write one element of each dtype.
#pragma once

#include <cstdint>
#include <limits>

#include "kernels/numerics.hpp"
#include "wherry/types.hpp"

namespace wherry::kernels {

// One NaN leaves a sum, whatever bits the operands had.
template <typename T>
[[nodiscard]] inline T canonical(T value) noexcept {
  return value != value ? std::numeric_limits<T>::quiet_NaN() : value;
}

template <DType kType>
struct Element;

template <>
struct Element<DType::bf16> {
  using Stored = std::uint16_t;
  using Sum = float;
  static Sum load(Stored value) noexcept { return bf16_to_float(value); }
  static Stored store(Sum value) noexcept { return float_to_bf16(value); }
};
template <>
struct Element<DType::f16> {
  using Stored = std::uint16_t;
  using Sum = float;
  static Sum load(Stored value) noexcept { return f16_to_float(value); }
  static Stored store(Sum value) noexcept { return float_to_f16(value); }
};
template <>
struct Element<DType::f32> {
  using Stored = float;
  using Sum = float;
  static Sum load(Stored value) noexcept { return value; }
  static Stored store(Sum value) noexcept { return canonical(value); }
};
template <>
struct Element<DType::f64> {
  using Stored = double;
  using Sum = double;
  static Sum load(Stored value) noexcept { return value; }
  static Stored store(Sum value) noexcept { return canonical(value); }
};

// The dtype in which rows of a dtype are summed.
[[nodiscard]] constexpr DType sum_dtype(DType dtype) noexcept {
  return dtype == DType::f64 ? DType::f64 : DType::f32;
}

// Calls fn.template operator()<kType>() for the dtype. raw has no elements: nothing is called.
template <typename Fn>
void with_element(DType dtype, Fn fn) {
  switch (dtype) {
    case DType::bf16: fn.template operator()<DType::bf16>(); return;
    case DType::f16: fn.template operator()<DType::f16>(); return;
    case DType::f32: fn.template operator()<DType::f32>(); return;
    case DType::f64: fn.template operator()<DType::f64>(); return;
    case DType::raw: return;
  }
}

}  // namespace wherry::kernels
