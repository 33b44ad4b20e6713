// How a packing begins: replica counts, the first fill, and parting duplicates.
#include "placement/packing.hpp"

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

namespace wherry {

namespace {

double mean_rank_load(std::span<const double> loads, std::size_t ranks) {
  return std::accumulate(loads.begin(), loads.end(), 0.0) / static_cast<double>(ranks);
}

}  // namespace

Packing::Packing(std::span<const double> loads, std::size_t ranks, std::size_t slots_per_rank)
    : loads_(loads),
      ranks_(ranks),
      per_rank_(slots_per_rank),
      bound_(mean_rank_load(loads, ranks)) {
  count_replicas();
  fill();
}

Packing::Packing(std::span<const double> loads, std::size_t ranks,
                 std::vector<std::size_t> expert_of_slot)
    : loads_(loads),
      ranks_(ranks),
      per_rank_(expert_of_slot.size() / ranks),
      bound_(mean_rank_load(loads, ranks)),
      slots_(std::move(expert_of_slot)) {
  replicas_.assign(num_experts(), 0);
  for (const std::size_t expert : slots_) ++replicas_[expert];
  recount();
}

double Packing::largest_load() const noexcept { return rank_loads_[heaviest()]; }

std::size_t Packing::heaviest() const noexcept {
  return static_cast<std::size_t>(std::max_element(rank_loads_.begin(), rank_loads_.end()) -
                                  rank_loads_.begin());
}

// The hottest expert gets the next replica, which keeps the hottest replica as cool as it can be;
// one on every rank already gets more only when all are.
void Packing::count_replicas() {
  replicas_.assign(num_experts(), 1);
  shares_.assign(loads_.begin(), loads_.end());
  const std::size_t num_slots = ranks_ * per_rank_;
  const auto cooler = [&](std::size_t a, std::size_t b) {
    const bool a_everywhere = replicas_[a] >= ranks_;
    const bool b_everywhere = replicas_[b] >= ranks_;
    if (a_everywhere != b_everywhere) return a_everywhere;
    const double share_a = share(a), share_b = share(b);
    return share_a != share_b ? share_a < share_b : a > b;
  };
  std::vector<std::size_t> heap(num_experts());
  std::iota(heap.begin(), heap.end(), std::size_t{0});
  std::make_heap(heap.begin(), heap.end(), cooler);
  for (std::size_t placed = num_experts(); placed < num_slots; ++placed) {
    std::pop_heap(heap.begin(), heap.end(), cooler);
    set_replicas(heap.back(), replicas_[heap.back()] + 1);
    std::push_heap(heap.begin(), heap.end(), cooler);
  }
  // Other counts have a hotter replica.
  bound_ = std::max(bound_, *std::max_element(shares_.begin(), shares_.end()));
}

void Packing::fill() {
  std::vector<std::size_t> order(num_experts());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return share(a) != share(b) ? share(a) > share(b) : a < b;
  });
  slots_.assign(ranks_ * per_rank_, 0);
  rank_loads_.assign(ranks_, 0.0);
  held_.assign(num_experts() * ranks_, 0);
  std::vector<std::size_t> used(ranks_, 0);
  for (const std::size_t expert : order) {
    for (std::size_t replica = 0; replica < replicas_[expert]; ++replica) {
      std::size_t best = ranks_;
      for (std::size_t r = 0; r < ranks_; ++r) {
        if (used[r] == per_rank_) continue;
        if (best == ranks_ || std::pair(held(expert, r), rank_loads_[r]) <
                                  std::pair(held(expert, best), rank_loads_[best]))
          best = r;
      }
      slots_[best * per_rank_ + used[best]++] = expert;
      rank_loads_[best] += share(expert);
      ++held(expert, best);
    }
  }
}

void Packing::set_replicas(std::size_t expert, std::size_t replicas) noexcept {
  replicas_[expert] = replicas;
  shares_[expert] = share_with(expert, replicas);
}

// From slots_ and replicas_, without the rounding that updates gather.
void Packing::recount() {
  shares_.resize(num_experts());
  for (std::size_t e = 0; e < num_experts(); ++e) shares_[e] = share_with(e, replicas_[e]);
  held_.assign(num_experts() * ranks_, 0);
  for (std::size_t slot = 0; slot < slots_.size(); ++slot) ++held(slots_[slot], rank_of(slot));
  sum_rank_loads();
}

void Packing::sum_rank_loads() {
  rank_loads_.assign(ranks_, 0.0);
  for (std::size_t slot = 0; slot < slots_.size(); ++slot)
    rank_loads_[rank_of(slot)] += share(slots_[slot]);
}

Packing::Gift Packing::gift_of(std::size_t slot, std::size_t expert) const noexcept {
  const std::size_t loses = slots_[slot];
  const double left = share_with(loses, replicas_[loses] - 1);
  const double gained = share_with(expert, replicas_[expert] + 1);
  return {loses, expert, rank_of(slot), left - share(loses), share(expert) - gained, gained - left};
}

double Packing::largest_after(const Gift& gift) const noexcept {
  double largest = 0;
  for (std::size_t r = 0; r < ranks_; ++r) largest = std::max(largest, load_after(gift, r));
  return largest;
}

void Packing::give_slot(std::size_t slot, std::size_t expert) {
  std::size_t& now = slots_[slot];
  --held(now, rank_of(slot));
  ++held(expert, rank_of(slot));
  set_replicas(now, replicas_[now] - 1);
  set_replicas(expert, replicas_[expert] + 1);
  now = expert;
  sum_rank_loads();
}

void Packing::part_duplicates() {
  if (per_rank_ > num_experts()) return;
  for (std::size_t slot = 0; slot < slots_.size(); ++slot) {
    const std::size_t expert = slots_[slot], rank = rank_of(slot);
    if (held(expert, rank) < 2) continue;
    Swap swap;
    swap.larger = std::numeric_limits<double>::infinity();
    for (std::size_t other = 0; other < slots_.size(); ++other) {
      const std::size_t to = rank_of(other);
      if (held(expert, to) > 0 || held(slots_[other], rank) > 0) continue;
      const double less = share(expert) - share(slots_[other]);
      const double larger = std::max(rank_loads_[rank] - less, rank_loads_[to] + less);
      if (larger < swap.larger) swap = {slot, other, larger};
    }
    // Or the expert does with a replica less. Some other one is not on this rank yet, as a rank has
    // no more slots than there are experts.
    std::size_t gains = num_experts();
    double least = std::numeric_limits<double>::infinity();
    for (std::size_t e = 0; e < num_experts(); ++e) {
      if (held(e, rank) > 0) continue;
      const double largest = largest_after(gift_of(slot, e));
      if (largest < least) {
        least = largest;
        gains = e;
      }
    }
    if (std::max(swap.larger, largest_load()) <= least) {
      apply(swap);
    } else {
      give_slot(slot, gains);
    }
  }
}

}  // namespace wherry
