// silu(gate) * up in fp32. exp is ours, not libm's, which picks its code by processor: these are the
// same bits on every machine, and a loop around them has no calls. Relative error below 4e-7.
#pragma once

#include <cstdint>

#include "kernels/numerics.hpp"

namespace wherry::experts {

// exp(x) for x in [-88, 88], or NaN for NaN.
[[nodiscard]] inline float exp_bounded(float x) noexcept {
  constexpr float kLog2E = 0x1.715476p+0F;
  constexpr float kLn2High = 0x1.62e4p-1F;  // ends in zeros: n * kLn2High is exact
  constexpr float kLn2Low = 0x1.7f7d1cp-20F;
  constexpr float kToInteger = 0x1.8p23F;  // adding it leaves the nearest integer in the low bits
  const float shifted = x * kLog2E + kToInteger;
  const float n = shifted - kToInteger;
  const float r = (x - n * kLn2High) - n * kLn2Low;  // |r| <= ln(2)/2
  float p = 1.0F / 5040;                             // Taylor: the next term is below 6e-9
  p = p * r + 1.0F / 720;
  p = p * r + 1.0F / 120;
  p = p * r + 1.0F / 24;
  p = p * r + 1.0F / 6;
  p = p * r + 0.5F;
  p = p * r + 1.0F;
  p = p * r + 1.0F;
  return p * bits_float((float_bits(shifted) + 127U) << 23);  // * 2^n; 0 below 2^-126
}

[[nodiscard]] inline float silu_times(float gate, float up) noexcept {
  float x = -gate;
  x = x < -88.0F ? -88.0F : x;
  x = x > 88.0F ? 88.0F : x;
  return gate / (1.0F + exp_bounded(x)) * up;
}

}  // namespace wherry::experts
