#include "wherry/placement.hpp"

#include <algorithm>
#include <numeric>
#include <utility>

#include "support/check.hpp"

namespace wherry {

Placement Placement::contiguous(int experts, int ranks) {
  WHERRY_CHECK_ARGUMENT(experts >= 1, Stage::placement, "experts is {}; it must be at least 1",
                        experts);
  WHERRY_CHECK_ARGUMENT(ranks >= 1, Stage::placement, "ranks is {}; it must be at least 1", ranks);
  std::vector<int> slot_to_expert(static_cast<std::size_t>(experts));
  std::iota(slot_to_expert.begin(), slot_to_expert.end(), 0);
  std::vector<int> slot_begin(static_cast<std::size_t>(ranks) + 1, 0);
  for (int r = 0; r < ranks; ++r) {
    const auto at = static_cast<std::size_t>(r);
    slot_begin[at + 1] = slot_begin[at] + experts / ranks + (r < experts % ranks ? 1 : 0);
  }
  return from_slots(experts, std::move(slot_to_expert), std::move(slot_begin));
}

Placement Placement::from_slots(int experts, std::vector<int> slot_to_expert,
                                std::vector<int> slot_begin) {
  WHERRY_CHECK_ARGUMENT(experts >= 1, Stage::placement, "experts is {}; it must be at least 1",
                        experts);
  WHERRY_CHECK_ARGUMENT(
      slot_begin.size() >= 2 && slot_begin.front() == 0 &&
          slot_begin.back() == static_cast<int>(slot_to_expert.size()) &&
          std::is_sorted(slot_begin.begin(), slot_begin.end()),
      Stage::placement,
      "slot_begin must rise from 0 to the number of slots ({}), with one entry more than ranks",
      slot_to_expert.size());
  Placement p;
  p.expert_begin_.assign(static_cast<std::size_t>(experts) + 1, 0);
  for (std::size_t s = 0; s < slot_to_expert.size(); ++s) {
    const int expert = slot_to_expert[s];
    WHERRY_CHECK_ARGUMENT(expert >= -1 && expert < experts, Stage::placement,
                          "slot {} holds expert {}; allowed are 0..{} and -1 for an empty slot", s,
                          expert, experts - 1);
    if (expert >= 0) ++p.expert_begin_[static_cast<std::size_t>(expert) + 1];
  }
  for (int e = 0; e < experts; ++e) {
    WHERRY_CHECK_ARGUMENT(p.expert_begin_[static_cast<std::size_t>(e) + 1] > 0, Stage::placement,
                          "expert {} has no slot; every expert needs at least one", e);
  }
  std::partial_sum(p.expert_begin_.begin(), p.expert_begin_.end(), p.expert_begin_.begin());
  p.expert_slots_.resize(static_cast<std::size_t>(p.expert_begin_.back()));
  std::vector<int> fill(p.expert_begin_.begin(), p.expert_begin_.end() - 1);
  for (std::size_t s = 0; s < slot_to_expert.size(); ++s) {
    if (slot_to_expert[s] < 0) continue;
    int& at = fill[static_cast<std::size_t>(slot_to_expert[s])];
    p.expert_slots_[static_cast<std::size_t>(at++)] = static_cast<int>(s);
  }
  p.slot_to_rank_.resize(slot_to_expert.size());
  for (std::size_t r = 0; r + 1 < slot_begin.size(); ++r) {
    std::fill(p.slot_to_rank_.begin() + slot_begin[r], p.slot_to_rank_.begin() + slot_begin[r + 1],
              static_cast<int>(r));
  }
  p.slot_to_expert_ = std::move(slot_to_expert);
  p.slot_begin_ = std::move(slot_begin);
  return p;
}

int Placement::max_local_slots() const noexcept {
  int most = 0;
  for (int r = 0; r < num_ranks(); ++r) most = std::max(most, num_local_slots(r));
  return most;
}

int Placement::slot_for(int expert, std::int64_t token, int source_rank) const noexcept {
  const std::span<const int> slots = slots_of(expert);
  if (slots.size() == 1) return slots[0];
  const auto turn = static_cast<std::uint64_t>(token) + static_cast<std::uint64_t>(source_rank);
  return slots[turn % slots.size()];
}

}  // namespace wherry
