// Which expert lives where: experts -> slots -> ranks. A slot is a physical place for one expert;
// with replicas there are more slots than experts. Slots are numbered rank by rank. Plain data,
// identical on every rank; no communication.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace wherry {

class Placement {
 public:
  // One slot an expert, in order; the first (experts % ranks) ranks hold one more than the others.
  // Ranks beyond the number of experts hold none. Throws bad_argument for experts < 1 or ranks < 1.
  [[nodiscard]] static Placement contiguous(int experts, int ranks);

  // Any placement: slot s holds expert slot_to_expert[s], and rank r holds the slots
  // [slot_begin[r], slot_begin[r+1]). Every expert needs at least one slot; a slot may hold -1
  // (empty). Throws bad_argument, naming the entry.
  [[nodiscard]] static Placement from_slots(int experts, std::vector<int> slot_to_expert,
                                            std::vector<int> slot_begin);

  [[nodiscard]] int num_experts() const noexcept {
    return static_cast<int>(expert_begin_.size()) - 1;
  }
  [[nodiscard]] int num_slots() const noexcept { return static_cast<int>(slot_to_expert_.size()); }
  [[nodiscard]] int num_ranks() const noexcept { return static_cast<int>(slot_begin_.size()) - 1; }
  [[nodiscard]] int num_local_slots(int rank) const noexcept {
    return slot_begin_[static_cast<std::size_t>(rank) + 1] -
           slot_begin_[static_cast<std::size_t>(rank)];
  }
  [[nodiscard]] int max_local_slots() const noexcept;

  // First slot of each rank, [ranks + 1].
  [[nodiscard]] std::span<const int> slot_begin() const noexcept { return slot_begin_; }
  // Expert of each slot (-1: empty), [slots].
  [[nodiscard]] std::span<const int> slot_to_expert() const noexcept { return slot_to_expert_; }
  // Rank of each slot, [slots].
  [[nodiscard]] std::span<const int> slot_to_rank() const noexcept { return slot_to_rank_; }
  // The slots of one expert, ascending.
  [[nodiscard]] std::span<const int> slots_of(int expert) const noexcept {
    const auto begin = static_cast<std::size_t>(expert_begin_[static_cast<std::size_t>(expert)]);
    const auto end = static_cast<std::size_t>(expert_begin_[static_cast<std::size_t>(expert) + 1]);
    return std::span<const int>(expert_slots_).subspan(begin, end - begin);
  }

  // The replica that serves (token, source rank): a pure function, so every rank can compute it.
  // Tokens of one rank rotate over the replicas, starting at a place that depends on the rank.
  [[nodiscard]] int slot_for(int expert, std::int64_t token, int source_rank) const noexcept;

  [[nodiscard]] bool operator==(const Placement&) const = default;

 private:
  std::vector<int> slot_to_expert_;
  std::vector<int> slot_to_rank_;
  std::vector<int> slot_begin_;
  std::vector<int> expert_slots_;  // slots grouped by expert
  std::vector<int> expert_begin_;  // [experts + 1] into expert_slots_
};

}  // namespace wherry
