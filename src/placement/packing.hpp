// Replicas packed into ranks: the state that our own balancer builds and improves. Internal.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace wherry {

// Experts of one node (or of all) in the equal-sized ranks of that node. Every slot is always
// filled, every expert has a replica, and an expert's load is shared equally by its replicas.
class Packing {
 public:
  // Heaviest replica first, each to the rank that holds the fewest replicas of its expert, of those
  // the lightest one with room. `slots_per_rank * ranks >= loads.size() >= 1`.
  Packing(std::span<const double> loads, std::size_t ranks, std::size_t slots_per_rank);
  // As given: the expert of each slot.
  Packing(std::span<const double> loads, std::size_t ranks,
          std::vector<std::size_t> expert_of_slot);

  [[nodiscard]] const std::vector<std::size_t>& expert_of_slot() const noexcept { return slots_; }
  [[nodiscard]] double largest_load() const noexcept;
  // No packing has a smaller largest load: the mean, or the hottest replica if that is more.
  [[nodiscard]] double lower_bound() const noexcept { return bound_; }

  // Gives each duplicate (a second replica on the same rank) another rank, or its slot another expert, while a rank's slots are not
  // more than the experts; raises the largest load as little as it can.
  void part_duplicates();

  // Local search for a largest load of at most `target`, until it has looked at some `effort`
  // candidates. Never ends above where it began, never adds a duplicate.
  void improve(double target, std::uint64_t effort);

 private:
  void count_replicas();
  void fill();
  void set_replicas(std::size_t expert, std::size_t replicas) noexcept;
  void recount();
  void sum_rank_loads();

  [[nodiscard]] std::size_t num_experts() const noexcept { return loads_.size(); }
  [[nodiscard]] std::size_t rank_of(std::size_t slot) const noexcept { return slot / per_rank_; }
  [[nodiscard]] std::size_t heaviest() const noexcept;
  // Load of each replica of an expert, now and with another number of replicas.
  [[nodiscard]] double share(std::size_t expert) const noexcept { return shares_[expert]; }
  [[nodiscard]] double share_with(std::size_t expert, std::size_t replicas) const noexcept {
    return loads_[expert] / static_cast<double>(replicas);
  }
  [[nodiscard]] std::uint32_t& held(std::size_t expert, std::size_t rank) noexcept {
    return held_[expert * ranks_ + rank];
  }
  [[nodiscard]] const std::uint32_t& held(std::size_t expert, std::size_t rank) const noexcept {
    return held_[expert * ranks_ + rank];
  }

  // search.cpp
  struct Swap {
    std::size_t slot = 0, other = 0;  // in the heavier and in the lighter rank
    double larger = 0;                // of the two rank loads afterwards
  };
  [[nodiscard]] bool may_leave(std::size_t expert, std::size_t from, std::size_t to) const noexcept;
  [[nodiscard]] bool find_swap(std::size_t heavy, double target, Swap& swap);
  [[nodiscard]] bool find_swap(std::size_t heavy, std::size_t light, Swap& swap);
  void apply(const Swap& swap);
  // What giving a slot to another expert does to the rank loads.
  struct Gift {
    std::size_t loses, gains, rank;
    double rises, falls;  // the shares of both experts, everywhere
    double here;          // and what else changes on `rank`
  };
  [[nodiscard]] Gift gift_of(std::size_t slot, std::size_t expert) const noexcept;
  [[nodiscard]] double load_after(const Gift& gift, std::size_t rank) const noexcept {
    return rank_loads_[rank] + gift.rises * held(gift.loses, rank) -
           gift.falls * held(gift.gains, rank) + (rank == gift.rank ? gift.here : 0.0);
  }
  [[nodiscard]] double largest_after(const Gift& gift) const noexcept;
  void give_slot(std::size_t slot, std::size_t expert);
  bool swap_down(double target);
  bool shift_replica(double target);
  void settle(double target);
  void kick(std::uint64_t& random, double target);
  [[nodiscard]] double room_bound();
  [[nodiscard]] double room_bound_after(std::size_t loses, std::size_t gains);

  std::span<const double> loads_;
  std::size_t ranks_, per_rank_;
  double bound_ = 0;
  std::vector<std::size_t> replicas_;     // [experts]
  std::vector<double> shares_;            // load / replicas, [experts]
  std::vector<std::size_t> slots_;        // expert of each slot
  std::vector<double> rank_loads_;        // [ranks]
  std::vector<std::uint32_t> held_;       // replicas of an expert on a rank, [experts, ranks]
  std::vector<std::size_t> light_first_;  // scratch: ranks by load
  std::vector<double> all_shares_;        // scratch: of all replicas
  std::int64_t work_ = 0;                 // candidates looked at and still allowed, see improve()
};

}  // namespace wherry
