// Inside the balancers: one layer at a time, everything std::size_t. Internal.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

namespace wherry {

// The loads and shape of one layer. If the groups play no part, groups = nodes = 1.
struct BalanceProblem {
  std::span<const double> loads;  // [experts]
  std::size_t ranks, nodes, slots, groups;

  [[nodiscard]] std::size_t experts() const noexcept { return loads.size(); }
  [[nodiscard]] std::size_t slots_per_rank() const noexcept { return slots / ranks; }
  [[nodiscard]] std::size_t slots_per_node() const noexcept { return slots / nodes; }
  [[nodiscard]] std::size_t ranks_per_node() const noexcept { return ranks / nodes; }
  [[nodiscard]] std::size_t experts_per_group() const noexcept { return experts() / groups; }
};

struct BalanceTables {
  std::vector<std::size_t> expert_of_slot;   // [slots]
  std::vector<std::size_t> replica_of_slot;  // which replica of its expert, from 0, [slots]
};

// EPLB, arithmetic in fp32 as published.
[[nodiscard]] BalanceTables balance_reference(const BalanceProblem& problem);
// Ours; `reference` is what it must not be worse than.
[[nodiscard]] BalanceTables balance_best(const BalanceProblem& problem,
                                         const BalanceTables& reference);

}  // namespace wherry
