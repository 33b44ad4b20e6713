#include <algorithm>
#include <cmath>
#include <vector>

#include "route/checks.hpp"
#include "wherry/router.hpp"

namespace wherry {
namespace {

// Entries (token * topk + k) grouped by the expert they name, ascending within each.
struct Buckets {
  std::vector<std::int64_t> entries;
  std::vector<std::size_t> begin;  // [experts + 1]

  Buckets(std::span<const std::int32_t> ids, int experts)
      : begin(static_cast<std::size_t>(experts) + 1) {
    for (const std::int32_t id : ids) {
      if (id >= 0) ++begin[static_cast<std::size_t>(id) + 1];
    }
    for (std::size_t i = 1; i < begin.size(); ++i) begin[i] += begin[i - 1];
    entries.resize(begin.back());
    std::vector<std::size_t> next = begin;
    for (std::size_t i = 0; i < ids.size(); ++i) {
      if (ids[i] >= 0)
        entries[next[static_cast<std::size_t>(ids[i])]++] = static_cast<std::int64_t>(i);
    }
  }
};

void check_drop(const RouterConfig& config, std::int64_t capacity, DropPolicy policy,
                std::span<const std::int32_t> ids, std::span<const float> weights) {
  config.check();
  WHERRY_CHECK_ARGUMENT(capacity >= 0, Stage::route, "capacity is {}; allowed: 0 or more",
                        capacity);
  const auto topk = static_cast<std::size_t>(config.topk);
  WHERRY_CHECK_ARGUMENT(ids.size() % topk == 0, Stage::route,
                        "ids holds {} values; expected a multiple of {} (topk)", ids.size(), topk);
  check_length("weights", weights.size(), static_cast<std::int64_t>(ids.size() / topk),
               config.topk);
  check_ids("token", 0, ids, config.topk, config.experts);
  if (policy == DropPolicy::position) return;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    WHERRY_CHECK_ARGUMENT(ids[i] < 0 || !std::isnan(weights[i]), Stage::route,
                          "the weight of token {}, choice {} (expert {}) is NaN; allowed under "
                          "'probs': values that can be ordered",
                          i / topk, i % topk, ids[i]);
  }
}

}  // namespace

std::int64_t expert_capacity(const RouterConfig& config, std::int64_t tokens,
                             const CapacityConfig& capacity) {
  config.check();
  check_tokens(tokens);
  WHERRY_CHECK_ARGUMENT(std::isfinite(capacity.factor) && capacity.factor > 0.0, Stage::route,
                        "the capacity factor is {}; allowed: finite values above 0",
                        capacity.factor);
  WHERRY_CHECK_ARGUMENT(capacity.minimum >= 0, Stage::route,
                        "the minimum capacity is {}; allowed: 0 or more", capacity.minimum);
  const auto t = static_cast<double>(tokens);
  double entries = 0.0;
  switch (capacity.formula) {
    case CapacityFormula::deepspeed:
      entries = static_cast<double>(static_cast<float>(t / config.experts) *
                                    static_cast<float>(capacity.factor * config.topk));
      break;
    case CapacityFormula::megatron:
      entries = t * config.topk / config.experts * capacity.factor;
      break;
  }
  WHERRY_CHECK_ARGUMENT(entries <= 0x1p62, Stage::route,
                        "a capacity of {} entries does not fit; tokens {}, factor {}", entries,
                        tokens, capacity.factor);
  return std::max(static_cast<std::int64_t>(std::ceil(entries)), capacity.minimum);
}

std::int64_t drop_over_capacity(const RouterConfig& config, std::int64_t capacity,
                                DropPolicy policy, std::span<std::int32_t> ids,
                                std::span<float> weights, std::span<std::int64_t> dropped) {
  check_drop(config, capacity, policy, ids, weights);
  if (!dropped.empty()) check_length("dropped", dropped.size(), 1, config.experts);
  std::ranges::fill(dropped, 0);

  const auto heavier = [&](std::int64_t a, std::int64_t b) {
    const float weight_a = weights[static_cast<std::size_t>(a)];
    const float weight_b = weights[static_cast<std::size_t>(b)];
    return weight_a != weight_b ? weight_a > weight_b : a < b;
  };
  Buckets buckets(ids, config.experts);
  std::int64_t total = 0;
  for (std::size_t e = 0; e < static_cast<std::size_t>(config.experts); ++e) {
    const std::span<std::int64_t> entries =
        std::span(buckets.entries)
            .subspan(buckets.begin[e], buckets.begin[e + 1] - buckets.begin[e]);
    if (static_cast<std::int64_t>(entries.size()) <= capacity) continue;
    if (policy == DropPolicy::probs) {
      std::nth_element(entries.begin(), entries.begin() + capacity, entries.end(), heavier);
    }
    for (const std::int64_t entry : entries.subspan(static_cast<std::size_t>(capacity))) {
      ids[static_cast<std::size_t>(entry)] = -1;
      weights[static_cast<std::size_t>(entry)] = 0.0F;
    }
    const std::int64_t over = static_cast<std::int64_t>(entries.size()) - capacity;
    if (!dropped.empty()) dropped[e] = over;
    total += over;
  }
  return total;
}

}  // namespace wherry
