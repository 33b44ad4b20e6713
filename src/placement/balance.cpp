// From loads to placements: checks, one balancer a layer, the tables.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

#include "placement/balance.hpp"
#include "support/check.hpp"
#include "wherry/placement.hpp"

namespace wherry {

namespace {

constexpr float kMostLoad = std::numeric_limits<float>::max();  // the reference counts in fp32
constexpr int kMaxSlots = 1 << 16;
constexpr std::size_t kMaxTable = 1 << 26;  // experts x ranks: a table of the search

void check_loads(const std::vector<std::vector<double>>& loads) {
  WHERRY_CHECK_ARGUMENT(!loads.empty(), Stage::placement,
                        "loads has no layer; it needs at least one row");
  WHERRY_CHECK_ARGUMENT(!loads[0].empty() && loads[0].size() <= kMaxSlots, Stage::placement,
                        "loads[0] has {} experts; it must have 1..{}", loads[0].size(), kMaxSlots);
  for (std::size_t layer = 0; layer < loads.size(); ++layer) {
    WHERRY_CHECK_ARGUMENT(
        loads[layer].size() == loads[0].size(), Stage::placement,
        "loads[{}] has {} experts and loads[0] has {}; every layer needs the same number", layer,
        loads[layer].size(), loads[0].size());
    for (std::size_t e = 0; e < loads[layer].size(); ++e) {
      const double load = loads[layer][e];
      WHERRY_CHECK_ARGUMENT(load >= 0 && std::isfinite(load), Stage::placement,
                            "loads[{}][{}] is {}; a load must be finite and at least 0", layer, e,
                            load);
      WHERRY_CHECK_ARGUMENT(load <= static_cast<double>(kMostLoad), Stage::placement,
                            "loads[{}][{}] is {}; a load must be at most {}", layer, e, load,
                            kMostLoad);
    }
  }
}

void check_config(const BalanceConfig& config, std::size_t num_experts) {
  const int experts = static_cast<int>(num_experts);
  const auto [ranks, nodes, slots, groups, policy] = config;
  WHERRY_CHECK_ARGUMENT(ranks >= 1, Stage::placement, "ranks is {}; it must be at least 1", ranks);
  WHERRY_CHECK_ARGUMENT(num_experts * static_cast<std::size_t>(ranks) <= kMaxTable,
                        Stage::placement, "{} experts on {} ranks; their product may be at most {}",
                        experts, ranks, kMaxTable);
  WHERRY_CHECK_ARGUMENT(nodes >= 1, Stage::placement, "nodes is {}; it must be at least 1", nodes);
  WHERRY_CHECK_ARGUMENT(slots >= experts && slots <= kMaxSlots, Stage::placement,
                        "slots is {}; {} experts need {}..{}", slots, experts, experts, kMaxSlots);
  WHERRY_CHECK_ARGUMENT(slots % ranks == 0, Stage::placement,
                        "slots is {}; it must be a multiple of ranks ({})", slots, ranks);
  WHERRY_CHECK_ARGUMENT(groups >= 1 && experts % groups == 0, Stage::placement,
                        "groups is {}; it must divide the number of experts ({})", groups, experts);
  WHERRY_CHECK_ARGUMENT(
      groups % nodes != 0 || ranks % nodes == 0, Stage::placement,
      "nodes is {}; with groups ({}) a multiple of it, it must divide ranks ({}) too", nodes,
      groups, ranks);
  WHERRY_CHECK_ARGUMENT(policy == BalancePolicy::reference || policy == BalancePolicy::best,
                        Stage::placement, "policy is {}; it must be reference or best",
                        static_cast<int>(policy));
}

std::vector<int> even_slot_begin(std::size_t ranks, std::size_t slots) {
  std::vector<int> begin(ranks + 1);
  for (std::size_t r = 0; r <= ranks; ++r) begin[r] = static_cast<int>(r * (slots / ranks));
  return begin;
}

Placement placement_of(const BalanceProblem& problem, const BalanceTables& tables) {
  std::vector<int> slots(problem.slots);
  std::ranges::transform(tables.expert_of_slot, slots.begin(),
                         [](std::size_t expert) { return static_cast<int>(expert); });
  return Placement::from_slots(static_cast<int>(problem.experts()), std::move(slots),
                               even_slot_begin(problem.ranks, problem.slots));
}

BalancedLayer layer_of(const Placement& placement, std::span<const double> loads) {
  BalancedLayer layer;
  layer.physical_to_logical.assign(placement.slot_to_expert().begin(),
                                   placement.slot_to_expert().end());
  for (int e = 0; e < placement.num_experts(); ++e) {
    const std::span<const int> slots = placement.slots_of(e);
    layer.logical_to_physical.emplace_back(slots.begin(), slots.end());
    layer.replicas.push_back(static_cast<int>(slots.size()));
  }
  layer.rank_loads = rank_loads(placement, loads);
  layer.imbalance = imbalance(layer.rank_loads);
  return layer;
}

std::size_t duplicates(const Placement& placement) {
  std::size_t count = 0;
  for (int e = 0; e < placement.num_experts(); ++e) {
    const std::span<const int> slots = placement.slots_of(e);  // ascending, so ranks are too
    for (std::size_t i = 1; i < slots.size(); ++i) {
      count += placement.slot_to_rank()[static_cast<std::size_t>(slots[i - 1])] ==
               placement.slot_to_rank()[static_cast<std::size_t>(slots[i])];
    }
  }
  return count;
}

bool keeps_groups(const Placement& placement, const BalanceProblem& problem) {
  std::vector<std::size_t> node_of_group(problem.groups, problem.nodes);
  for (std::size_t slot = 0; slot < problem.slots; ++slot) {
    const auto expert = static_cast<std::size_t>(placement.slot_to_expert()[slot]);
    std::size_t& node = node_of_group[expert / problem.experts_per_group()];
    if (node == problem.nodes) node = slot / problem.slots_per_node();
    if (node != slot / problem.slots_per_node()) return false;
  }
  return true;
}

// Whether to stay with what there is rather than go to `other`: it has its shape, keeps all its
// rules and is as even.
bool as_good_as(const Placement& from, const Placement& other, const BalanceProblem& problem) {
  const auto same = [](std::span<const int> a, std::span<const int> b) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end());
  };
  if (from.num_experts() != other.num_experts()) return false;
  if (!same(from.slot_begin(), other.slot_begin())) return false;
  if (std::ranges::count(from.slot_to_expert(), -1) > 0) return false;
  if (!keeps_groups(from, problem) || duplicates(from) > duplicates(other)) return false;
  constexpr double kRounding = 1 + 1e-13;
  return std::ranges::max(rank_loads(from, problem.loads)) <=
         std::ranges::max(rank_loads(other, problem.loads)) * kRounding;
}

BalancedLayer balance_layer(const BalanceProblem& problem, BalancePolicy policy,
                            const Placement* from) {
  const BalanceTables reference = balance_reference(problem);
  if (policy == BalancePolicy::reference) {
    BalancedLayer layer = layer_of(placement_of(problem, reference), problem.loads);
    for (std::size_t slot = 0; slot < problem.slots; ++slot) {
      layer.logical_to_physical[reference.expert_of_slot[slot]][reference.replica_of_slot[slot]] =
          static_cast<int>(slot);
    }
    return layer;
  }
  Placement placement = placement_of(problem, balance_best(problem, reference));
  if (from != nullptr) {
    placement = as_good_as(*from, placement, problem)
                    ? *from
                    : keep_in_place(*from, placement, static_cast<int>(problem.nodes));
  }
  return layer_of(placement, problem.loads);
}

}  // namespace

std::string_view name(BalancePolicy policy) noexcept {
  switch (policy) {
    case BalancePolicy::reference: return "reference";
    case BalancePolicy::best: return "best";
  }
  return "?";
}

Placement BalancedLayer::placement() const {
  return Placement::from_slots(static_cast<int>(replicas.size()), physical_to_logical,
                               even_slot_begin(rank_loads.size(), physical_to_logical.size()));
}

std::vector<double> rank_loads(const Placement& placement, std::span<const double> loads) {
  WHERRY_CHECK_ARGUMENT(loads.size() == static_cast<std::size_t>(placement.num_experts()),
                        Stage::placement, "loads has {} entries; the placement has {} experts",
                        loads.size(), placement.num_experts());
  std::vector<double> result(static_cast<std::size_t>(placement.num_ranks()), 0.0);
  for (std::size_t slot = 0; slot < placement.slot_to_expert().size(); ++slot) {
    const int expert = placement.slot_to_expert()[slot];
    if (expert < 0) continue;
    result[static_cast<std::size_t>(placement.slot_to_rank()[slot])] +=
        loads[static_cast<std::size_t>(expert)] /
        static_cast<double>(placement.slots_of(expert).size());
  }
  return result;
}

double imbalance(std::span<const double> rank_loads) noexcept {
  if (rank_loads.empty()) return 1.0;
  const double sum = std::accumulate(rank_loads.begin(), rank_loads.end(), 0.0);
  const double most = *std::max_element(rank_loads.begin(), rank_loads.end());
  return sum > 0 ? most * static_cast<double>(rank_loads.size()) / sum : 1.0;
}

std::vector<BalancedLayer> balance(const std::vector<std::vector<double>>& loads,
                                   const BalanceConfig& config, std::span<const Placement> from) {
  check_loads(loads);
  check_config(config, loads[0].size());
  WHERRY_CHECK_ARGUMENT(from.empty() || from.size() == loads.size(), Stage::placement,
                        "from has {} placements; it needs one for each of the {} layers of loads",
                        from.size(), loads.size());
  const bool grouped = config.groups % config.nodes == 0;
  std::vector<BalancedLayer> layers;
  std::size_t most_replicas = 0;
  for (std::size_t i = 0; i < loads.size(); ++i) {
    const BalanceProblem problem{loads[i], static_cast<std::size_t>(config.ranks),
                                 static_cast<std::size_t>(grouped ? config.nodes : 1),
                                 static_cast<std::size_t>(config.slots),
                                 static_cast<std::size_t>(grouped ? config.groups : 1)};
    layers.push_back(balance_layer(problem, config.policy, from.empty() ? nullptr : &from[i]));
    for (const auto& slots : layers.back().logical_to_physical)
      most_replicas = std::max(most_replicas, slots.size());
  }
  for (BalancedLayer& layer : layers) {
    for (auto& slots : layer.logical_to_physical) slots.resize(most_replicas, -1);
  }
  return layers;
}

}  // namespace wherry
