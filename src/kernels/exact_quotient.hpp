// x / divisor for many x, bit for bit as a division rounds it, for a fourth of what the division takes: what
// kernels use where a format divides each element by the scale of its block.
//
// A product with the correctly rounded reciprocal is at most 1.5 units in the last place off, a first
// correction brings it within one, and from there the second is exact (Markstein, 1990). Both corrections are
// written so that a zero keeps its sign. Holds while nothing of it over- or underflows that a code could
// show: quotients below 2^-20 are zeros of every format, and the divisor is bounded here. (A block with an
// infinity has a larger divisor than that.)
#pragma once

#include <cmath>

#include "kernels/layout.hpp"

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

}  // namespace wherry
