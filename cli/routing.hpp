// Routing without a model: every token gets random logits, by which a model's own router chooses.
#pragma once

#include <cstdint>
#include <vector>

#include "options.hpp"
#include "wherry/router.hpp"
#include "wherry/types.hpp"

namespace wherry::cli {

// Ids and weights [tokens, topk] of consecutive tokens of the global batch.
struct TokenRouting {
  std::vector<std::int32_t> ids;
  std::vector<float> weights;
  std::int64_t tokens = 0;
  int topk = 0;
  bool weight_on_input = false;  // weights belong on the rows, and combine has none

  [[nodiscard]] Routing view() const {
    return {ids.data(), weight_on_input ? nullptr : weights.data(), tokens, topk};
  }
};

// The logit of (token, expert) is log(popularity of the expert) plus Gumbel noise, so a token draws
// topk different experts with those popularities (before groups and bias, which change them). The
// selection bias, for routers that have one, is small and random. A function of (options, router,
// token) alone: ranks need not talk. Which experts are popular is shuffled by the seed. Throws what
// route() does.
[[nodiscard]] TokenRouting synthetic_routing(const RoutingOptions& options,
                                             const RouterConfig& router, std::int64_t first_token,
                                             std::int64_t tokens);

}  // namespace wherry::cli
