// The two functions that scores need, in fp64 with about 1e-14 relative error: far finer than the
// fp32 the scores are rounded to. Ours, not libm's, so that scores are the same bits on every
// machine (libm picks its code by processor) and the loops around them have no calls.
#pragma once

#include <bit>
#include <cstdint>

namespace wherry::route_math {

// exp(x) for x <= 0 or -inf; 0 below -708, where fp64 leaves its normal range.
[[nodiscard]] inline double exp_nonpositive(double x) noexcept {
  constexpr double kLog2E = 0x1.71547652b82fep+0;
  constexpr double kLn2High = 0x1.62e42fee00000p-1;  // ends in zeros: n * kLn2High is exact
  constexpr double kLn2Low = 0x1.a39ef35793c76p-33;
  constexpr double kToInteger = 0x1.8p52;  // adding it leaves the nearest integer in the low bits
  const bool vanishes = !(x >= -708.0);
  const double clamped = vanishes ? -708.0 : x;
  const double shifted = clamped * kLog2E + kToInteger;
  const double n = shifted - kToInteger;
  const double r = (clamped - n * kLn2High) - n * kLn2Low;  // |r| <= ln(2)/2
  double p = 1.0 / 479001600;                               // Taylor: the next term is below 2e-16
  p = p * r + 1.0 / 39916800;
  p = p * r + 1.0 / 3628800;
  p = p * r + 1.0 / 362880;
  p = p * r + 1.0 / 40320;
  p = p * r + 1.0 / 5040;
  p = p * r + 1.0 / 720;
  p = p * r + 1.0 / 120;
  p = p * r + 1.0 / 24;
  p = p * r + 1.0 / 6;
  p = p * r + 0.5;
  p = p * r + 1.0;
  p = p * r + 1.0;
  const std::uint64_t exponent =
      std::bit_cast<std::uint64_t>(shifted) + 1023;  // n + bias, low bits
  const double power = std::bit_cast<double>(exponent << 52);
  return vanishes ? 0.0 : p * power;
}

// log(1 + y) for 0 <= y <= 1: 2 atanh(z), z = y / (2 + y) <= 1/3.
[[nodiscard]] inline double log1p_unit(double y) noexcept {
  // 1/29, 1/27, ... 1/3: the next term of the series is below 1e-16. Even and odd places are summed
  // side by side, for half the latency.
  constexpr double kEven[] = {1.0 / 27, 1.0 / 23, 1.0 / 19, 1.0 / 15, 1.0 / 11, 1.0 / 7, 1.0 / 3};
  constexpr double kOdd[] = {1.0 / 29, 1.0 / 25, 1.0 / 21, 1.0 / 17, 1.0 / 13, 1.0 / 9, 1.0 / 5};
  const double z = y / (2.0 + y);
  const double z2 = z * z;
  const double z4 = z2 * z2;
  double even = 0.0;
  double odd = 0.0;
  for (int i = 0; i < 7; ++i) {
    even = even * z4 + kEven[i];
    odd = odd * z4 + kOdd[i];
  }
  return 2.0 * (z + z * z2 * (even + odd * z2));
}

}  // namespace wherry::route_math
