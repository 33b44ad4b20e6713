#include <algorithm>
#include <cmath>
#include <vector>

#include "route/checks.hpp"
#include "route/choose.hpp"
#include "route/scores.hpp"
#include "route/weigh.hpp"
#include "wherry/router.hpp"

namespace wherry {
namespace {

void check_input(const RouterConfig& config, const RouterInput& input) {
  config.check();
  check_tokens(input.tokens);
  const bool given = config.selection == Selection::given;
  const bool hash = config.selection == Selection::hash;
  const bool weighed = given && input.logits.empty();  // the caller brings weights, not logits
  check_length("logits", input.logits.size(), weighed ? 0 : input.tokens, config.experts);
  check_length("bias", input.bias.size(), config.bias ? 1 : 0, config.experts);
  check_length("token_ids", input.token_ids.size(), hash ? input.tokens : 0, 1);
  check_length("ids", input.ids.size(), given ? input.tokens : 0, config.topk);
  check_length("weights (given)", input.weights.size(), weighed ? input.tokens : 0, config.topk);
  WHERRY_CHECK_ARGUMENT(
      hash ? input.hash_table.size() % static_cast<std::size_t>(config.topk) == 0
           : input.hash_table.empty(),
      Stage::route, "hash_table holds {} values; expected {}", input.hash_table.size(),
      hash ? fmt::format("a multiple of {} (topk)", config.topk) : "none without hash routing");
  for (std::size_t i = 0; i < input.bias.size(); ++i) {
    WHERRY_CHECK_ARGUMENT(std::isfinite(input.bias[i]), Stage::route,
                          "the bias of expert {} is {}; allowed: finite values", i, input.bias[i]);
  }
  check_ids("token", 0, input.ids, config.topk, config.experts);
}

void choose_by_hash(const RouterConfig& config, const RouterInput& input, std::int64_t token,
                    std::span<std::int32_t> ids) {
  const std::int64_t token_id = input.token_ids[static_cast<std::size_t>(token)];
  const auto topk = static_cast<std::size_t>(config.topk);
  const auto rows = static_cast<std::int64_t>(input.hash_table.size() / topk);
  WHERRY_CHECK_ARGUMENT(
      token_id >= 0 && (rows == 0 || token_id < rows), Stage::route,
      "token {} has id {} in the vocabulary; allowed: 0 {}", token, token_id,
      rows == 0 ? "or more" : fmt::format("to {} (rows of hash_table)", rows - 1));
  if (rows == 0) {
    for (std::size_t k = 0; k < topk; ++k) {
      ids[k] = hash_expert(token_id, static_cast<int>(k), config.experts);
    }
    return;
  }
  // Only the rows in use are checked: a table has a row for every word of the vocabulary.
  const auto row = input.hash_table.subspan(static_cast<std::size_t>(token_id) * topk, topk);
  check_ids("hash_table row", token_id, row, config.topk, config.experts);
  std::ranges::copy(row, ids.begin());
}

}  // namespace

std::int32_t hash_expert(std::int64_t token_id, int k, int experts) noexcept {
  // splitmix64 (Steele et al. 2014), then the high bits scaled to [0, experts).
  std::uint64_t z = static_cast<std::uint64_t>(token_id) * 0x9e3779b97f4a7c15ULL +
                    static_cast<std::uint64_t>(k + 1) * 0xd1b54a32d192ed03ULL;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
  z = (z ^ (z >> 31)) >> 32;
  return static_cast<std::int32_t>((z * static_cast<std::uint64_t>(experts)) >> 32);
}

Routing route(const RouterConfig& config, const RouterInput& input, std::span<std::int32_t> ids,
              std::span<float> weights) {
  check_input(config, input);
  check_length("ids (output)", ids.size(), input.tokens, config.topk);
  check_length("weights (output)", weights.size(), input.tokens, config.topk);
  const Routing routing(ids.data(), config.weight_on_input ? nullptr : weights.data(), input.tokens,
                        config.topk);
  if (config.selection == Selection::given) {
    std::copy(input.ids.begin(), input.ids.end(), ids.begin());
    std::copy(input.weights.begin(), input.weights.end(), weights.begin());
    if (input.logits.empty()) return routing;
  }

  const auto experts = static_cast<std::size_t>(config.experts);
  const auto topk = static_cast<std::size_t>(config.topk);
  Chooser chooser(config);
  std::vector<double> scratch(std::max(experts, topk));
  for (std::int64_t token = 0; token < input.tokens; ++token) {
    const auto t = static_cast<std::size_t>(token);
    const std::span<const float> logits = input.logits.subspan(t * experts, experts);
    const std::span<std::int32_t> row_ids = ids.subspan(t * topk, topk);
    const float max = checked_max(token, logits);
    switch (config.selection) {
      case Selection::topk: chooser.choose(logits, max, input.bias, row_ids); break;
      case Selection::hash: choose_by_hash(config, input, token, row_ids); break;
      case Selection::given: break;
    }
    weigh(config, logits, max, row_ids, scratch, weights.subspan(t * topk, topk));
  }
  return routing;
}

}  // namespace wherry
