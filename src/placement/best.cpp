// Our own balancer: groups to nodes, then in each node the replicas to ranks by local search.
#include <algorithm>
#include <utility>

#include "placement/balance.hpp"
#include "placement/packing.hpp"

namespace wherry {

namespace {

// Enough: no measurement of a load is as exact. Above the mean, as a part of it.
constexpr double kCloseEnough = 1e-4;
// Sums of the same loads in another order are not worse.
constexpr double kRounding = 1 + 1e-13;
// Candidates the search may look at, a slot: 256 experts take some 3 ms.
constexpr std::uint64_t kEffortPerSlot = 7'000;

// What the search is after: close to the mean, and not above the reference.
double target_of(const Packing& packing, double not_above) {
  return std::min(packing.lower_bound() * (1 + kCloseEnough), not_above);
}

// The experts of each node, ascending, [nodes][experts / nodes].
using Nodes = std::vector<std::vector<std::size_t>>;

Nodes nodes_of_reference(const BalanceProblem& problem, const BalanceTables& reference) {
  Nodes nodes(problem.nodes);
  for (std::size_t slot = 0; slot < problem.slots; ++slot) {
    if (reference.replica_of_slot[slot] == 0)
      nodes[slot / problem.slots_per_node()].push_back(reference.expert_of_slot[slot]);
  }
  for (auto& experts : nodes) std::sort(experts.begin(), experts.end());
  return nodes;
}

Nodes pack_groups(const BalanceProblem& problem) {
  std::vector<double> group_loads(problem.groups, 0.0);
  for (std::size_t e = 0; e < problem.experts(); ++e)
    group_loads[e / problem.experts_per_group()] += problem.loads[e];
  Packing packing(group_loads, problem.nodes, problem.groups / problem.nodes);
  packing.improve(packing.lower_bound() * (1 + kCloseEnough), kEffortPerSlot * problem.groups);
  Nodes nodes(problem.nodes);
  for (std::size_t i = 0; i < problem.groups; ++i) {
    const std::size_t group = packing.expert_of_slot()[i];
    for (std::size_t e = 0; e < problem.experts_per_group(); ++e) {
      nodes[i / (problem.groups / problem.nodes)].push_back(group * problem.experts_per_group() +
                                                            e);
    }
  }
  for (auto& experts : nodes) std::sort(experts.begin(), experts.end());
  return nodes;
}

std::vector<double> loads_of(const BalanceProblem& problem,
                             const std::vector<std::size_t>& experts) {
  std::vector<double> loads(experts.size());
  std::ranges::transform(experts, loads.begin(), [&](std::size_t e) { return problem.loads[e]; });
  return loads;
}

struct Solution {
  std::vector<std::size_t> expert_of_slot;
  double largest = 0;
};

// Packs the node's experts (`local`: numbered by their place in `experts`) and appends its slots.
void append_node(const Packing& packing, const std::vector<std::size_t>& experts,
                 Solution& solution) {
  for (const std::size_t local : packing.expert_of_slot())
    solution.expert_of_slot.push_back(experts[local]);
  solution.largest = std::max(solution.largest, packing.largest_load());
}

Solution search(const BalanceProblem& problem, const Nodes& nodes, double not_above) {
  Solution solution;
  for (const auto& experts : nodes) {
    const std::vector<double> loads = loads_of(problem, experts);
    Packing packing(loads, problem.ranks_per_node(), problem.slots_per_rank());
    packing.part_duplicates();
    packing.improve(target_of(packing, not_above), kEffortPerSlot * problem.slots_per_node());
    append_node(packing, experts, solution);
  }
  return solution;
}

// For where the reference was lucky: from its own packing, and longer. As it is where parting its
// duplicates costs more than can be won back (they let a rank have 2/3 of an expert, say).
Solution search_from_reference(const BalanceProblem& problem, const BalanceTables& reference,
                               double not_above) {
  Solution solution;
  const Nodes nodes = nodes_of_reference(problem, reference);
  for (std::size_t node = 0; node < nodes.size(); ++node) {
    const std::vector<std::size_t>& experts = nodes[node];
    const std::vector<double> loads = loads_of(problem, experts);
    std::vector<std::size_t> slots;
    for (std::size_t i = 0; i < problem.slots_per_node(); ++i) {
      const std::size_t e = reference.expert_of_slot[node * problem.slots_per_node() + i];
      slots.push_back(static_cast<std::size_t>(std::lower_bound(experts.begin(), experts.end(), e) -
                                               experts.begin()));
    }
    const Packing given(loads, problem.ranks_per_node(), std::move(slots));
    Packing better = given;
    better.part_duplicates();
    better.improve(target_of(better, not_above), 4 * kEffortPerSlot * problem.slots_per_node());
    append_node(better.largest_load() <= not_above ? better : given, experts, solution);
  }
  return solution;
}

}  // namespace

BalanceTables balance_best(const BalanceProblem& problem, const BalanceTables& reference) {
  const double not_above =
      Packing(problem.loads, problem.ranks, reference.expert_of_slot).largest_load() * kRounding;
  const Nodes nodes = pack_groups(problem), other_nodes = nodes_of_reference(problem, reference);
  Solution best = search(problem, nodes, not_above);
  if (other_nodes != nodes) {
    Solution other = search(problem, other_nodes, not_above);
    if (other.largest < best.largest) best = std::move(other);
  }
  if (best.largest > not_above) best = search_from_reference(problem, reference, not_above);

  BalanceTables tables{std::move(best.expert_of_slot), std::vector<std::size_t>(problem.slots)};
  std::vector<std::size_t> replicas(problem.experts(), 0);
  for (std::size_t slot = 0; slot < problem.slots; ++slot)
    tables.replica_of_slot[slot] = replicas[tables.expert_of_slot[slot]]++;
  return tables;
}

}  // namespace wherry
