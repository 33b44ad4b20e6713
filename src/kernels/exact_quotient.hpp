// x / divisor for many x, for a fourth of what the division takes: what kernels use where a format divides
// each element by the scale of its block. With a Divisor bit for bit as a division rounds it; with a
// SplitReciprocal so that the code is the division's.
//
// A product with the correctly rounded reciprocal is at most 1.5 units in the last place off, a first
// correction brings it within one, and from there the second is exact (Markstein, 1990). Both corrections are
// written so that a zero keeps its sign. Holds while nothing of it over- or underflows that a code could
// show: quotients below 2^-20 are zeros of every format, and the divisor is bounded here. (A block with an
// infinity has a larger divisor than that.)
#pragma once

#include <cmath>

#include "kernels/numerics.hpp"

namespace wherry {

struct Divisor {
  float divisor;
  float reciprocal;
  bool bounded;  // quotient_by() may be used
};
[[nodiscard]] WHERRY_HD inline Divisor divisor_of(float divisor) noexcept {
  const bool bounded = divisor >= 0x1p-80F && divisor <= 0x1p110F;
  return {divisor, bounded ? 1.0F / divisor : 0.0F, bounded};
}
[[nodiscard]] WHERRY_HD inline float quotient_by(const Divisor& d, float x) noexcept {
  float quotient = x * d.reciprocal;
  quotient = fmaf(fmaf(d.divisor, quotient, -x), -d.reciprocal, quotient);
  return fmaf(fmaf(d.divisor, quotient, -x), -d.reciprocal, quotient);
}

// For bf16 as e4m3_block128, in two operations. The code of x * high + x * low is that of x / divisor: of
// eight bits each, x and the block's amax make few quotients, and few of them are a tie of e4m3. That all come
// out on the division's side is proved by trying all, as the test does.
struct SplitReciprocal {
  float high;  // below 1 / divisor
  float low;   // so it is positive, and a zero keeps its sign
};
// `near`: 1 / divisor within one unit in the last place.
[[nodiscard]] WHERRY_HD inline SplitReciprocal split_reciprocal(float divisor,
                                                                float near) noexcept {
  const float high = bits_float(float_bits(near) - 2);
  return {high, high * fmaf(-divisor, high, 1.0F)};
}
[[nodiscard]] WHERRY_HD inline float near_quotient_by(const SplitReciprocal& by, float x) noexcept {
  return fmaf(x, by.high, x * by.low);
}
// amax / 448, for amax of bf16 from 2^-80.
[[nodiscard]] WHERRY_HD inline float e4m3_scale(float amax) noexcept {
  constexpr float kLargestCode = 448.0F;
  constexpr float kReciprocal = 1.0F / kLargestCode;
  const float near = amax * kReciprocal;
  return fmaf(fmaf(-kLargestCode, near, amax), kReciprocal, near);
}

}  // namespace wherry
