#include "route/scores.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "route/math.hpp"
#include "support/check.hpp"

namespace wherry {
namespace {

using route_math::exp_nonpositive;
using route_math::log1p_unit;

double sigmoid(double x) {
  const double e = exp_nonpositive(-std::abs(x));  // never overflows, and keeps small scores exact
  return (x >= 0.0 ? 1.0 : e) / (1.0 + e);
}

double sqrtsoftplus(double x) {
  return std::sqrt(std::max(x, 0.0) + log1p_unit(exp_nonpositive(-std::abs(x))));
}

[[noreturn]] void refuse(std::int64_t token, std::span<const float> logits) {
  for (std::size_t i = 0; i < logits.size(); ++i) {
    WHERRY_CHECK_ARGUMENT(logits[i] < std::numeric_limits<float>::infinity(), Stage::route,
                          "the logit of token {}, expert {} is {}; allowed: finite values and -inf",
                          token, i, logits[i]);
  }
  throw Error(ErrorCode::bad_argument, {.stage = Stage::route},
              fmt::format("the logits of token {} are -inf for all of experts 0 to {}; allowed: at "
                          "least one finite value",
                          token, logits.size() - 1));
}

}  // namespace

float checked_max(std::int64_t token, std::span<const float> logits) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  float max = -kInfinity;
  bool good = true;
  for (const float x : logits) {
    good &= x < kInfinity;  // false for NaN too
    max = x > max ? x : max;
  }
  if (!good || max == -kInfinity) refuse(token, logits);
  return max;
}

double exponentials(std::span<const float> logits, float max, std::span<double> e) {
  double sum = 0.0;
  for (std::size_t i = 0; i < logits.size(); ++i) {
    e[i] = exp_nonpositive(static_cast<double>(logits[i]) - static_cast<double>(max));
  }
  for (std::size_t i = 0; i < logits.size(); ++i) sum += e[i];
  return sum;
}

double score_alone(Score score, double logit) noexcept {
  switch (score) {
    case Score::sigmoid: return sigmoid(logit);
    case Score::sqrtsoftplus: return sqrtsoftplus(logit);
    case Score::softmax:
    case Score::topk_softmax: break;
  }
  return logit;
}

void score_all(Score score, std::span<const float> logits, float max, std::span<double> scores) {
  if (score == Score::softmax) {
    const double inverse = 1.0 / exponentials(logits, max, scores);
    for (double& s : scores) s *= inverse;
    return;
  }
  for (std::size_t i = 0; i < logits.size(); ++i) {
    scores[i] = score_alone(score, static_cast<double>(logits[i]));
  }
}

}  // namespace wherry
