// The functions under the scores, against libm in extended precision.
#include "route/math.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace {

using wherry::route_math::exp_nonpositive;
using wherry::route_math::log1p_unit;

TEST(RouteMath, ExpIsWithinAFewUnitsOfFp64OfLibmWhereverFp64IsNormal) {
  long double worst = 0.0L;
  for (int i = 0; i <= 2'000'000; ++i) {
    const double x = -708.0 * i / 2'000'000;
    const long double want = std::exp(static_cast<long double>(x));
    worst = std::max(worst, std::abs((static_cast<long double>(exp_nonpositive(x)) - want) / want));
  }
  EXPECT_LT(worst, 1e-15L);
}

TEST(RouteMath, ExpIsExactAtTheEnds) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  EXPECT_EQ(exp_nonpositive(0.0), 1.0);
  EXPECT_EQ(exp_nonpositive(-0.0), 1.0);
  EXPECT_EQ(exp_nonpositive(-kInfinity), 0.0);
  EXPECT_EQ(exp_nonpositive(-1e300), 0.0);
  EXPECT_EQ(exp_nonpositive(-5e-324), 1.0);
}

TEST(RouteMath, Log1pIsWithinAFewUnitsOfFp64OfLibmOnTheUnitInterval) {
  long double worst = 0.0L;
  for (int i = 0; i <= 1'000'000; ++i) {
    for (const double y : {i / 1'000'000.0, std::ldexp(1.0, -i / 1000)}) {
      const long double want = std::log1p(static_cast<long double>(y));
      const long double error = std::abs(static_cast<long double>(log1p_unit(y)) - want);
      worst = std::max(worst, want == 0.0L ? error : error / want);
    }
  }
  EXPECT_LT(worst, 1e-15L);
}

}  // namespace
