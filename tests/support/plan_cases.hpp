// Plans of a whole group without a group: count_routing() and assign_rows() of every rank, as
// Exchange::plan() calls them, for any configuration and routing. Cases come from a source of
// numbers: a seed (unit/plan_properties_test.cpp) or the bytes of a fuzzer (fuzz/plan_fuzz.cpp).
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <numeric>
#include <optional>
#include <vector>

#include "plan/plan.hpp"
#include "wherry/error.hpp"

namespace wherry::test {

// Any number of [least, most].
using Numbers = std::function<std::int64_t(std::int64_t least, std::int64_t most)>;

// One rank's routing, with the memory it views.
struct RankRouting {
  std::vector<std::int64_t> ids;  // [tokens, topk], whatever `tokens` of the view claims
  std::vector<std::int32_t> ids32;
  std::vector<float> weights;
  Routing view;
};

struct PlanCase {
  int ranks = 1;
  ExchangeConfig config;
  std::vector<RankRouting> routings;
};

inline Placement any_placement(const Numbers& any, int experts, int ranks) {
  const int slots = experts + static_cast<int>(any(0, 8));  // replicas, empty slots
  std::vector<int> slot_to_expert(static_cast<std::size_t>(slots));
  std::iota(slot_to_expert.begin(), slot_to_expert.end(), 0);
  for (std::size_t s = static_cast<std::size_t>(experts); s < slot_to_expert.size(); ++s) {
    slot_to_expert[s] = static_cast<int>(any(-1, experts - 1));
  }
  for (std::size_t s = slot_to_expert.size() - 1; s > 0; --s) {
    std::swap(slot_to_expert[s],
              slot_to_expert[static_cast<std::size_t>(any(0, static_cast<std::int64_t>(s)))]);
  }
  std::vector<int> slot_begin{0, slots};
  while (std::ssize(slot_begin) <= ranks) slot_begin.push_back(static_cast<int>(any(0, slots)));
  std::ranges::sort(slot_begin);  // some ranks hold nothing
  return Placement::from_slots(experts, std::move(slot_to_expert), std::move(slot_begin));
}

// Every legal configuration of a small group.
inline PlanCase any_case(const Numbers& any) {
  PlanCase c;
  c.ranks = static_cast<int>(any(1, 6));
  ExchangeConfig& config = c.config;
  config.experts = static_cast<int>(any(1, 20));
  config.topk = static_cast<int>(any(1, 6));
  config.hidden = 8;
  config.max_tokens = any(1, 12);
  config.layout = static_cast<Layout>(any(0, 2));
  if (config.layout == Layout::tokens) {
    config.reduction = Reduction::by_rank;
  } else {
    config.reduction = static_cast<Reduction>(any(0, 1));
    config.overflow = static_cast<Overflow>(any(0, 1));
  }
  if (config.layout == Layout::grouped) config.alignment = static_cast<int>(any(1, 9));
  if (config.layout == Layout::slots) {
    config.rows_per_slot = any(0, 10);
  } else {
    config.receive_rows = any(0, 1) == 0 ? 0 : any(1, 40);
  }
  if (any(0, 2) != 0) config.placement = any_placement(any, config.experts, c.ranks);
  if (any(0, 3) == 0) config.expert_ids = ExpertIds::physical;
  const auto replicated = static_cast<int>(any(1, c.ranks));
  if (c.ranks % replicated == 0) config.replicated = replicated;
  config.combine_to = static_cast<CombineTo>(any(0, 1));
  return c;
}

// The routing of the first rank of a set is that of all.
inline RankRouting same_routing(const RankRouting& first) {
  RankRouting r = first;
  r.view.ids = first.view.ids_are_int64 ? static_cast<const void*>(r.ids.data()) : r.ids32.data();
  if (first.view.weights != nullptr) r.view.weights = r.weights.data();
  return r;
}

// A legal routing: any tokens (often none), -1 and repeated experts among the ids.
inline RankRouting any_routing(const Numbers& any, const ExchangeConfig& config, int ranks) {
  RankRouting r;
  const Placement placement = placement_of(config, ranks);
  const std::int64_t tokens = any(0, 4) == 0 ? 0 : any(0, config.max_tokens);
  const std::int64_t crowd = any(0, 3) == 0 ? std::min(config.experts, 2) : config.experts;
  for (std::int64_t i = 0; i < tokens * config.topk; ++i) {
    std::int64_t id = any(-1, crowd - 1);
    if (id >= 0 && config.expert_ids == ExpertIds::physical) {
      const auto slots = placement.slots_of(static_cast<int>(id));
      id = slots[static_cast<std::size_t>(any(0, std::ssize(slots) - 1))];
    }
    r.ids.push_back(id);
    r.ids32.push_back(static_cast<std::int32_t>(r.ids.back()));
    r.weights.push_back(static_cast<float>(any(1, 100)) / 64.0F);
  }
  const float* const weights = any(0, 3) == 0 ? nullptr : r.weights.data();
  r.view = any(0, 1) == 0 ? Routing(r.ids.data(), weights, tokens, config.topk)
                          : Routing(r.ids32.data(), weights, tokens, config.topk);
  return r;
}

// What planning made of a case.
struct Planned {
  Placement placement;
  Capacity capacity;
  std::vector<layout::CountHeader> headers;
  std::vector<std::vector<std::int32_t>> entries;
  std::vector<PlanData> plans;                   // of the ranks, where no rank's routing is bad
  std::vector<std::vector<std::int64_t>> loads;  // as each rank counts them
  std::vector<std::optional<ErrorCode>> errors;  // of assign_rows()
  [[nodiscard]] bool routings_are_good(const ExchangeConfig& config) const {
    for (std::size_t rank = 0; rank < headers.size(); ++rank) {
      const auto& first = headers[rank - rank % static_cast<std::size_t>(config.replicated)];
      const auto& own = headers[rank];
      if (own.status != 0 || own.tokens != first.tokens || own.id != first.id) return false;
    }
    return true;
  }
};

// Throws what the constructor of Exchange would throw for the configuration.
inline Planned plan_group(const PlanCase& c) {
  check_config(c.config, 0, c.ranks);
  Placement placement = placement_of(c.config, c.ranks);
  Planned p{placement, capacity_of(c.config, placement), {}, {}, {}, {}, {}};
  const std::size_t num_entries =
      placement.slot_to_expert().size() + static_cast<std::size_t>(c.ranks);
  for (int rank = 0; rank < c.ranks; ++rank) {
    p.entries.emplace_back(num_entries, -1);
    p.plans.emplace_back();
    p.headers.push_back(count_routing(c.routings[static_cast<std::size_t>(rank)].view, c.config,
                                      placement, rank, p.plans.back(), p.entries.back()));
  }
  if (!p.routings_are_good(c.config)) return p;
  const std::vector<CountsOf> counts(p.entries.begin(), p.entries.end());
  for (int rank = 0; rank < c.ranks; ++rank) {
    p.loads.emplace_back(static_cast<std::size_t>(c.config.experts), 0);
    p.errors.emplace_back();
    try {
      assign_rows(counts, c.config, placement, p.capacity, rank,
                  p.plans[static_cast<std::size_t>(rank)], p.loads.back());
    } catch (const Error& error) {
      p.errors.back() = error.code();
    }
  }
  return p;
}

}  // namespace wherry::test
