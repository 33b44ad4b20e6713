// The reference balancer: EPLB (github.com/deepseek-ai/EPLB), groups to nodes, replicas inside each
// node, replicas to ranks. Sums in fp32, ties to the lowest index: its tables, entry for entry.
#include <algorithm>
#include <numeric>

#include "placement/balance.hpp"

namespace wherry {

namespace {

struct Packed {
  std::vector<std::size_t> pack, place;  // of each item
};

// Heaviest item first, each to the lightest pack that has room.
Packed pack_balanced(const std::vector<float>& weights, std::size_t packs) {
  const std::size_t room = weights.size() / packs;
  Packed packed{std::vector<std::size_t>(weights.size()), std::vector<std::size_t>(weights.size())};
  std::vector<std::size_t> order(weights.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  if (room == 1) {
    packed.pack = order;
    return packed;
  }
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return weights[a] != weights[b] ? weights[a] > weights[b] : a < b;
  });
  std::vector<float> pack_weight(packs, 0.0F);
  std::vector<std::size_t> pack_items(packs, 0);
  for (const std::size_t item : order) {
    std::size_t lightest = packs;
    for (std::size_t p = 0; p < packs; ++p) {
      if (pack_items[p] == room) continue;
      if (lightest == packs || pack_weight[p] < pack_weight[lightest]) lightest = p;
    }
    packed.pack[item] = lightest;
    packed.place[item] = pack_items[lightest]++;
    pack_weight[lightest] += weights[item];
  }
  return packed;
}

struct Replicated {
  std::vector<std::size_t> item, replica;  // of each physical place
  std::vector<std::size_t> count;          // of each item
};

Replicated replicate(const std::vector<float>& weights, std::size_t places) {
  Replicated result;
  result.item.resize(weights.size());
  std::iota(result.item.begin(), result.item.end(), std::size_t{0});
  result.replica.assign(weights.size(), 0);
  result.count.assign(weights.size(), 1);
  while (result.item.size() < places) {
    std::size_t hottest = 0;
    float most = -1.0F;
    for (std::size_t i = 0; i < weights.size(); ++i) {
      const float share = weights[i] / static_cast<float>(result.count[i]);
      if (share > most) {
        most = share;
        hottest = i;
      }
    }
    result.item.push_back(hottest);
    result.replica.push_back(result.count[hottest]++);
  }
  return result;
}

}  // namespace

BalanceTables balance_reference(const BalanceProblem& problem) {
  const std::size_t group_size = problem.experts_per_group();
  std::vector<float> loads(problem.experts());
  for (std::size_t e = 0; e < loads.size(); ++e) loads[e] = static_cast<float>(problem.loads[e]);
  std::vector<float> group_loads(problem.groups, 0.0F);
  for (std::size_t e = 0; e < loads.size(); ++e) group_loads[e / group_size] += loads[e];

  const Packed groups = pack_balanced(group_loads, problem.nodes);
  const std::size_t node_experts = problem.experts() / problem.nodes;
  std::vector<std::size_t> expert_at(problem.experts());  // experts in the order of the nodes
  for (std::size_t e = 0; e < loads.size(); ++e) {
    const std::size_t group = e / group_size;
    const std::size_t at = groups.pack[group] * node_experts + groups.place[group] * group_size;
    expert_at[at + e % group_size] = e;
  }

  BalanceTables tables{std::vector<std::size_t>(problem.slots),
                       std::vector<std::size_t>(problem.slots)};
  for (std::size_t node = 0; node < problem.nodes; ++node) {
    std::vector<float> weights(node_experts);
    for (std::size_t i = 0; i < node_experts; ++i)
      weights[i] = loads[expert_at[node * node_experts + i]];
    const Replicated replicas = replicate(weights, problem.slots_per_node());
    std::vector<float> shares(replicas.item.size());
    for (std::size_t i = 0; i < shares.size(); ++i) {
      const std::size_t item = replicas.item[i];
      shares[i] = weights[item] / static_cast<float>(replicas.count[item]);
    }
    const Packed ranks = pack_balanced(shares, problem.ranks_per_node());
    for (std::size_t i = 0; i < shares.size(); ++i) {
      const std::size_t slot = node * problem.slots_per_node() +
                               ranks.pack[i] * problem.slots_per_rank() + ranks.place[i];
      tables.expert_of_slot[slot] = expert_at[node * node_experts + replicas.item[i]];
      tables.replica_of_slot[slot] = replicas.replica[i];
    }
  }
  return tables;
}

}  // namespace wherry
