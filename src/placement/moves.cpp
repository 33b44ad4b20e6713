// From one placement to the next with few copies.
#include <algorithm>
#include <cstdint>
#include <numeric>
#include <utility>

#include "placement/assignment.hpp"
#include "support/check.hpp"
#include "wherry/placement.hpp"

namespace wherry {

namespace {

void check_pair(const Placement& from, const Placement& to, int nodes) {
  WHERRY_CHECK_ARGUMENT(from.num_experts() == to.num_experts(), Stage::placement,
                        "from has {} experts and to has {}; they must be the same",
                        from.num_experts(), to.num_experts());
  WHERRY_CHECK_ARGUMENT(from.num_ranks() == to.num_ranks(), Stage::placement,
                        "from has {} ranks and to has {}; they must be the same", from.num_ranks(),
                        to.num_ranks());
  WHERRY_CHECK_ARGUMENT(nodes >= 1 && to.num_ranks() % nodes == 0, Stage::placement,
                        "nodes is {}; it must divide the number of ranks ({})", nodes,
                        to.num_ranks());
}

std::span<const int> experts_of(const Placement& placement, std::size_t rank) {
  const auto begin = static_cast<std::size_t>(placement.slot_begin()[rank]);
  const auto end = static_cast<std::size_t>(placement.slot_begin()[rank + 1]);
  return placement.slot_to_expert().subspan(begin, end - begin);
}

// Weights that must come from elsewhere if rank `at`, as it is in `from`, takes the experts of
// rank `as` of `to`. [at, as]
std::vector<std::int64_t> missing_experts(const Placement& from, const Placement& to) {
  const auto ranks = static_cast<std::size_t>(to.num_ranks());
  std::vector<std::int64_t> missing(ranks * ranks, 0);
  std::vector<std::size_t> seen(static_cast<std::size_t>(to.num_experts()));
  for (std::size_t at = 0; at < ranks; ++at) {
    for (std::size_t as = 0; as < ranks; ++as) {
      const std::size_t mark = at * ranks + as + 1;
      for (const int e : experts_of(from, at))
        if (e >= 0) seen[static_cast<std::size_t>(e)] = mark;
      for (const int e : experts_of(to, as)) {
        if (e < 0 || seen[static_cast<std::size_t>(e)] == mark) continue;
        seen[static_cast<std::size_t>(e)] = mark;
        ++missing[at * ranks + as];
      }
    }
  }
  return missing;
}

struct Assigned {
  std::vector<std::size_t> as;
  std::int64_t cost = 0;
};

// Of equally cheap assignments one that leaves more where they are.
Assigned assign(const std::vector<std::int64_t>& cost, std::size_t n) {
  std::vector<std::int64_t> preferred(cost.size());
  for (std::size_t i = 0; i < cost.size(); ++i)
    preferred[i] = cost[i] * static_cast<std::int64_t>(n + 1) + (i / n == i % n ? 0 : 1);
  Assigned assigned{cheapest_assignment(preferred, n), 0};
  for (std::size_t i = 0; i < n; ++i) assigned.cost += cost[i * n + assigned.as[i]];
  return assigned;
}

// For each rank the rank of `to` whose experts it takes.
std::vector<std::size_t> assign_ranks(const Placement& from, const Placement& to,
                                      std::size_t nodes) {
  const std::vector<std::int64_t> missing = missing_experts(from, to);
  const auto ranks = static_cast<std::size_t>(to.num_ranks());
  const std::size_t size = ranks / nodes;
  std::vector<std::int64_t> node_cost(nodes * nodes);
  std::vector<Assigned> inside(nodes * nodes);
  for (std::size_t pair = 0; pair < nodes * nodes; ++pair) {
    std::vector<std::int64_t> cost(size * size);
    for (std::size_t i = 0; i < cost.size(); ++i)
      cost[i] = missing[(pair / nodes * size + i / size) * ranks + pair % nodes * size + i % size];
    inside[pair] = assign(cost, size);
    node_cost[pair] = inside[pair].cost;
  }
  const Assigned whole = assign(node_cost, nodes);
  std::vector<std::size_t> as(ranks);
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    const std::size_t node = rank / size, as_node = whole.as[node];
    as[rank] = as_node * size + inside[node * nodes + as_node].as[rank % size];
  }
  return as;
}

// The same experts in an order that leaves in its slot whatever `now` holds.
std::vector<int> order_like(std::span<const int> now, std::span<const int> experts) {
  std::vector<int> left(experts.begin(), experts.end());
  constexpr int kOpen = -2;
  std::vector<int> result(experts.size(), kOpen);
  for (std::size_t i = 0; i < std::min(now.size(), result.size()); ++i) {
    const auto found = std::find(left.begin(), left.end(), now[i]);
    if (found == left.end()) continue;
    result[i] = now[i];
    left.erase(found);
  }
  auto next = left.begin();
  for (int& expert : result)
    if (expert == kOpen) expert = *next++;
  return result;
}

}  // namespace

Placement keep_in_place(const Placement& from, const Placement& to, int nodes) {
  check_pair(from, to, nodes);
  const auto ranks = static_cast<std::size_t>(to.num_ranks());
  std::vector<std::size_t> as(ranks);
  std::iota(as.begin(), as.end(), std::size_t{0});
  if (to.num_slots() == to.num_ranks() * to.max_local_slots())
    as = assign_ranks(from, to, static_cast<std::size_t>(nodes));
  std::vector<int> slots;
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    const std::vector<int> here = order_like(experts_of(from, rank), experts_of(to, as[rank]));
    slots.insert(slots.end(), here.begin(), here.end());
  }
  return Placement::from_slots(to.num_experts(), std::move(slots),
                               {to.slot_begin().begin(), to.slot_begin().end()});
}

std::vector<Move> moves(const Placement& from, const Placement& to, int nodes) {
  check_pair(from, to, nodes);
  const int node_size = to.num_ranks() / nodes;
  const auto distance = [&](int rank, int other) {
    return rank == other ? 0 : rank / node_size == other / node_size ? 1 : 2;
  };
  std::vector<std::int64_t> sent(static_cast<std::size_t>(from.num_ranks()), 0);
  std::vector<Move> result;
  for (std::size_t rank = 0; rank < static_cast<std::size_t>(to.num_ranks()); ++rank) {
    const std::span<const int> now = experts_of(from, rank), then = experts_of(to, rank);
    for (std::size_t i = 0; i < then.size(); ++i) {
      if (then[i] < 0 || (i < now.size() && now[i] == then[i])) continue;
      const int here = static_cast<int>(rank);
      Move move{then[i], -1, to.slot_begin()[rank] + static_cast<int>(i), -1, here};
      std::pair<int, std::int64_t> nearest;
      for (const int slot : from.slots_of(move.expert)) {
        const int source = from.slot_to_rank()[static_cast<std::size_t>(slot)];
        const std::pair near(distance(source, here), sent[static_cast<std::size_t>(source)]);
        if (move.from_slot >= 0 && near >= nearest) continue;
        nearest = near;
        move.from_slot = slot;
        move.from_rank = source;
      }
      if (move.travels()) ++sent[static_cast<std::size_t>(move.from_rank)];
      result.push_back(move);
    }
  }
  std::sort(result.begin(), result.end(), [&](const Move& a, const Move& b) {
    return std::pair(distance(a.from_rank, a.to_rank), a.to_slot) <
           std::pair(distance(b.from_rank, b.to_rank), b.to_slot);
  });
  return result;
}

}  // namespace wherry
