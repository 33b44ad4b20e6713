#include "route/weigh.hpp"

#include <algorithm>
#include <limits>

#include "route/math.hpp"
#include "route/scores.hpp"

namespace wherry {
namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// values[k] = value(logit of ids[k]), 0 for no expert; returns their sum.
template <typename Value>
double evaluate(std::span<const float> logits, std::span<const std::int32_t> ids,
                std::span<double> values, const Value& value) {
  double sum = 0.0;
  for (std::size_t k = 0; k < ids.size(); ++k) {
    values[k] =
        ids[k] < 0 ? 0.0 : value(static_cast<double>(logits[static_cast<std::size_t>(ids[k])]));
    sum += values[k];
  }
  return sum;
}

auto exp_minus(float top) {
  return [top = static_cast<double>(top)](double logit) {
    return route_math::exp_nonpositive(logit - top);
  };
}

float largest(std::span<const float> logits, std::span<const std::int32_t> ids) {
  float top = kMinusInfinity;
  for (const std::int32_t id : ids) {
    if (id >= 0) top = std::max(top, logits[static_cast<std::size_t>(id)]);
  }
  return top;
}

}  // namespace

void weigh(const RouterConfig& config, std::span<const float> logits, float max,
           std::span<const std::int32_t> ids, std::span<double> scratch, std::span<float> weights) {
  double divisor = 1.0;
  if (config.score == Score::topk_softmax || (config.score == Score::softmax && config.normalize)) {
    // A softmax over all experts, divided by the sum of the chosen, is a softmax over the chosen;
    // taken from the largest of them it cannot underflow as a whole.
    const float top = largest(logits, ids);
    if (top == kMinusInfinity) {
      std::ranges::fill(weights, 0.0F);
      return;
    }
    divisor = evaluate(logits, ids, scratch, exp_minus(top));
  } else if (config.score == Score::softmax) {
    divisor = exponentials(logits, max, scratch.first(logits.size()));
    evaluate(logits, ids, scratch, exp_minus(max));
  } else {
    const double sum = evaluate(
        logits, ids, scratch, [&config](double logit) { return score_alone(config.score, logit); });
    if (config.normalize) divisor = sum + 1e-20;
  }
  const auto scale = static_cast<double>(config.scale);
  for (std::size_t k = 0; k < ids.size(); ++k) {
    weights[k] = static_cast<float>(scratch[k] / divisor * scale);
  }
}

}  // namespace wherry
