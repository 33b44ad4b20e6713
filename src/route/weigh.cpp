#include "route/weigh.hpp"

#include <algorithm>
#include <limits>

#include "route/math.hpp"
#include "route/scores.hpp"

namespace wherry {
namespace {

// weights[k] = value(id) / divisor(sum of the values) * scale, rounded once.
template <typename Value, typename Divisor>
void share_out(std::span<const std::int32_t> ids, double scale, std::span<float> weights,
               const Value& value, const Divisor& divisor) {
  double sum = 0.0;
  for (const std::int32_t id : ids) sum += id < 0 ? 0.0 : value(static_cast<std::size_t>(id));
  const double by = divisor(sum);
  for (std::size_t k = 0; k < ids.size(); ++k) {
    const std::int32_t id = ids[k];
    weights[k] =
        id < 0 ? 0.0F : static_cast<float>(value(static_cast<std::size_t>(id)) / by * scale);
  }
}

}  // namespace

void weigh(const RouterConfig& config, std::span<const float> logits, float max,
           std::span<const std::int32_t> ids, std::span<double> scratch, std::span<float> weights) {
  const auto scale = static_cast<double>(config.scale);
  const auto exp_from = [logits](float top) {
    return [logits, top = static_cast<double>(top)](std::size_t expert) {
      const auto logit = static_cast<double>(logits[expert]);
      // Equal even where both are -inf, whose difference is NaN.
      return top == logit ? 1.0 : route_math::exp_nonpositive(logit - top);
    };
  };
  if (config.score == Score::topk_softmax || (config.score == Score::softmax && config.normalize)) {
    // A softmax over all experts, divided by the sum of the chosen, is a softmax over the chosen;
    // taken from the largest of them it cannot underflow as a whole. If all are -inf: weights 0.
    float top = -std::numeric_limits<float>::infinity();
    for (const std::int32_t id : ids) {
      if (id >= 0) top = std::max(top, logits[static_cast<std::size_t>(id)]);
    }
    const bool none = top == -std::numeric_limits<float>::infinity();
    share_out(ids, none ? 0.0 : scale, weights, exp_from(top), [](double sum) { return sum; });
  } else if (config.score == Score::softmax) {
    const double all = exponentials(logits, max, scratch);
    share_out(ids, scale, weights, exp_from(max), [all](double) { return all; });
  } else {
    const auto score = [&](std::size_t expert) {
      return score_alone(config.score, static_cast<double>(logits[expert]));
    };
    share_out(ids, scale, weights, score,
              [&](double sum) { return config.normalize ? sum + 1e-20 : 1.0; });
  }
}

}  // namespace wherry
