// Weights of the experts a token has got.
#pragma once

#include <cstdint>
#include <span>

#include "wherry/router.hpp"

namespace wherry {

// weights [topk] of ids [topk] (-1: weight 0). `max` is the checked_max() of logits [experts];
// scratch [max(experts, topk)] is overwritten.
void weigh(const RouterConfig& config, std::span<const float> logits, float max,
           std::span<const std::int32_t> ids, std::span<double> scratch, std::span<float> weights);

}  // namespace wherry
