// How a packing gets better. Swaps between a heavy and a lighter rank; when none helps, a slot
// changes from an expert with replicas to spare to one of the heaviest rank; when that does not
// help either, a few slots change their expert at random and the swaps start again from there.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "placement/packing.hpp"

namespace wherry {

namespace {

// A load must fall by more than rounding to count as lower.
constexpr double kClearly = 1.0 - 1e-10;
// Above the bound, as a part of it.
constexpr double kAlmostEven = 1e-2;

// splitmix64: the same on every machine.
std::size_t draw(std::uint64_t& state, std::size_t below) {
  state += 0x9E3779B97F4A7C15ULL;
  std::uint64_t z = state;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
  return static_cast<std::size_t>((z ^ (z >> 31)) % below);
}

}  // namespace

// Whether that leaves as many duplicates as there were, or fewer.
bool Packing::may_leave(std::size_t expert, std::size_t from, std::size_t to) const noexcept {
  return held(expert, to) == 0 || held(expert, from) > 1;
}

// The best swap between two ranks: the difference of the two replicas should be half of the
// difference of the ranks. Lowers swap.larger if it finds one.
bool Packing::find_swap(std::size_t heavy, std::size_t light, Swap& swap) {
  const double heavy_load = rank_loads_[heavy];
  const double middle = (heavy_load + rank_loads_[light]) / 2;
  const double half = (heavy_load - rank_loads_[light]) / 2;
  if (middle >= swap.larger) return false;
  bool found = false;
  const std::size_t* const others = slots_.data() + light * per_rank_;
  work_ -= static_cast<std::int64_t>(per_rank_ * per_rank_);
  for (std::size_t i = 0; i < per_rank_; ++i) {
    const std::size_t slot = heavy * per_rank_ + i;
    const double wanted = share(slots_[slot]) - half;
    for (std::size_t j = 0; j < per_rank_; ++j) {
      const double larger = middle + std::fabs(wanted - share(others[j]));
      if (larger >= swap.larger) continue;
      if (!may_leave(slots_[slot], heavy, light) || !may_leave(others[j], light, heavy)) continue;
      swap = {slot, light * per_rank_ + j, larger};
      found = true;
    }
  }
  return found;
}

// Over all lighter ranks, lightest first; content with the first that reaches the target.
bool Packing::find_swap(std::size_t heavy, double target, Swap& swap) {
  swap.larger = rank_loads_[heavy] * kClearly;
  bool found = false;
  for (const std::size_t light : light_first_) {
    if (rank_loads_[light] >= swap.larger) break;
    if (light != heavy && find_swap(heavy, light, swap)) found = true;
    if (found && swap.larger <= target) break;
  }
  return found;
}

void Packing::apply(const Swap& swap) {
  const std::size_t from = rank_of(swap.slot), to = rank_of(swap.other);
  std::size_t& expert = slots_[swap.slot];
  std::size_t& other = slots_[swap.other];
  const double less = share(expert) - share(other);
  --held(expert, from);
  ++held(expert, to);
  --held(other, to);
  ++held(other, from);
  rank_loads_[from] -= less;
  rank_loads_[to] += less;
  std::swap(expert, other);
}

// One swap that makes the heaviest rank lighter, or else the next heaviest above the target.
bool Packing::swap_down(double target) {
  light_first_.resize(ranks_);
  std::iota(light_first_.begin(), light_first_.end(), std::size_t{0});
  std::sort(light_first_.begin(), light_first_.end(), [&](std::size_t a, std::size_t b) {
    return rank_loads_[a] != rank_loads_[b] ? rank_loads_[a] < rank_loads_[b] : a < b;
  });
  for (std::size_t i = ranks_; i-- > 0;) {
    const std::size_t heavy = light_first_[i];
    if (rank_loads_[heavy] <= target) return false;
    Swap swap;
    if (find_swap(heavy, target, swap)) {
      apply(swap);
      return true;
    }
  }
  return false;
}

// A largest load that no packing of these replica counts can be below. The h hottest replicas take
// up h ranks (fewer would be heavier still), and the coolest replicas are the best to fill them with.
// Without this an expert just below a rank's mean load looks finished, and nothing small enough is
// left to fill its ranks.
double Packing::room_bound() {
  all_shares_.clear();
  for (std::size_t e = 0; e < num_experts(); ++e)
    all_shares_.insert(all_shares_.end(), replicas_[e], shares_[e]);
  std::sort(all_shares_.begin(), all_shares_.end());
  work_ -= static_cast<std::int64_t>(8 * all_shares_.size());
  double sum = 0, bound = 0;
  std::size_t cool = 0;
  for (std::size_t h = 1; h <= ranks_; ++h) {
    sum += all_shares_[all_shares_.size() - h];
    for (; cool < h * (per_rank_ - 1); ++cool) sum += all_shares_[cool];
    bound = std::max(bound, sum / static_cast<double>(h));
  }
  return bound;
}

double Packing::room_bound_after(std::size_t loses, std::size_t gains) {
  set_replicas(loses, replicas_[loses] - 1);
  set_replicas(gains, replicas_[gains] + 1);
  const double bound = room_bound();
  set_replicas(loses, replicas_[loses] + 1);
  set_replicas(gains, replicas_[gains] - 1);
  return bound;
}

// Gives an expert of the heaviest rank one more replica, in a slot of an expert that has two or
// more, if that lowers the loads above the target (the sum of their squared excess).
bool Packing::shift_replica(double target) {
  const auto square_excess = [&](double load) {
    const double excess = load - target;
    return excess > 0 ? excess * excess : 0.0;
  };
  double best = 0;
  for (const double load : rank_loads_) best += square_excess(load);
  best *= kClearly;
  std::size_t best_slot = slots_.size(), best_expert = 0;
  const std::size_t heavy = heaviest();
  const double allowed = std::max(target, room_bound());
  for (std::size_t i = heavy * per_rank_; i < (heavy + 1) * per_rank_; ++i) {
    const std::size_t gains = slots_[i];
    if (replicas_[gains] >= ranks_) continue;
    for (std::size_t slot = 0; slot < slots_.size(); ++slot) {
      const std::size_t loses = slots_[slot];
      if (replicas_[loses] < 2 || held(gains, rank_of(slot)) > 0) continue;
      const Gift gift = gift_of(slot, gains);
      double sum = 0;
      std::size_t r = 0;
      for (; r < ranks_ && sum < best; ++r) sum += square_excess(load_after(gift, r));
      work_ -= static_cast<std::int64_t>(2 * r);
      if (sum < best && room_bound_after(loses, gains) <= allowed) {
        best = sum;
        best_slot = slot;
        best_expert = gains;
      }
    }
  }
  if (best_slot == slots_.size()) return false;
  give_slot(best_slot, best_expert);
  return true;
}

void Packing::settle(double target) {
  while (largest_load() > target && work_ > 0) {
    if (!swap_down(target) && !shift_replica(target)) return;
  }
}

// One or two slots change their expert. Where there are no replicas to spare, and half the time
// where the loads are almost even (finer steps are wanted), two slots change places instead.
void Packing::kick(std::uint64_t& random, double target) {
  const double allowed = std::max(target, room_bound());
  const bool spare = num_experts() < slots_.size();
  const bool almost_even = target < bound_ * (1 + kAlmostEven);
  std::size_t left = 1 + draw(random, 2);
  for (int tries = 0; left > 0 && tries < 64; ++tries) {
    const std::size_t slot = draw(random, slots_.size()), at = rank_of(slot);
    const std::size_t other = draw(random, slots_.size()), there = rank_of(other);
    const std::size_t loses = slots_[slot], gains = slots_[other];
    if (!spare || (almost_even && draw(random, 2) == 0)) {
      if (at == there || !may_leave(loses, at, there) || !may_leave(gains, there, at)) continue;
      apply({slot, other, 0.0});
    } else {
      if (replicas_[loses] < 2 || held(gains, at) > 0) continue;
      if (room_bound_after(loses, gains) > allowed) continue;
      give_slot(slot, gains);
    }
    --left;
  }
}

void Packing::improve(double target, std::uint64_t effort) {
  work_ = static_cast<std::int64_t>(effort);
  if (num_experts() == slots_.size()) target = std::max(target, room_bound());
  std::vector<std::size_t> best_slots = slots_, best_replicas = replicas_;
  const auto restore = [&] {
    slots_ = best_slots;
    replicas_ = best_replicas;
    recount();
    work_ -= static_cast<std::int64_t>(slots_.size() + held_.size() / 8);
  };
  double least = largest_load();
  std::uint64_t random = 0;
  for (bool first = true; least > target && work_ > 0; first = false) {
    // Half way first: a target too near makes the search polish ranks that are good enough.
    const double nearer = std::max(target, (least + bound_) / 2);
    if (!first) kick(random, nearer);
    settle(nearer);
    sum_rank_loads();
    const double now = largest_load();
    if (now <= least) {
      work_ -= static_cast<std::int64_t>(slots_.size());
      best_slots = slots_;
      best_replicas = replicas_;
      least = now;
    } else {
      restore();
    }
  }
  restore();
}

}  // namespace wherry
