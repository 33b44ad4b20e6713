// Routing without a model: every token gets random logits, and a softmax router chooses by them.
#pragma once

#include <cstdint>
#include <vector>

#include "options.hpp"
#include "wherry/types.hpp"

namespace wherry::cli {

// Ids and weights [tokens, topk] of consecutive tokens of the global batch.
struct TokenRouting {
  std::vector<std::int32_t> ids;
  std::vector<float> weights;  // sum to 1 for each token
  std::int64_t tokens = 0;
  int topk = 0;

  [[nodiscard]] Routing view() const { return {ids.data(), weights.data(), tokens, topk}; }
};

// The logit of (token, expert) is log(popularity of the expert) plus Gumbel noise, so a token draws
// topk different experts with those popularities. A function of (options, experts, token) alone:
// ranks need not talk. Which experts are popular is shuffled by the seed. Throws what route() does.
[[nodiscard]] TokenRouting synthetic_routing(const RoutingOptions& options, int experts, int topk,
                                             std::int64_t first_token, std::int64_t tokens);

}  // namespace wherry::cli
