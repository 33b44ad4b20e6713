// Which expert lives where: experts -> slots -> ranks. A slot is a physical place for one expert;
// with replicas there are more slots than experts. Slots are numbered rank by rank. Plain data and
// pure functions: the same arguments give the same result on every rank; no communication.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
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

enum class BalancePolicy : std::uint8_t {
  reference,  // DeepSeek's EPLB, table for table
  best,       // ours: largest rank load never above the reference's
};
[[nodiscard]] std::string_view name(BalancePolicy policy) noexcept;

// Where replicas may go. Slots are spread evenly: each rank has slots / ranks of them.
struct BalanceConfig {
  int ranks = 0;  // >= 1
  int nodes = 1;  // >= 1; node n holds the ranks [n * ranks / nodes, (n + 1) * ranks / nodes)
  int slots = 0;  // at least one an expert, a multiple of ranks
  int groups =
      1;  // >= 1, divides the experts: group g is the g-th run of experts / groups experts.
  // If groups is a multiple of nodes each group stays on one node, with all its replicas (and ranks
  // must be a multiple of nodes); else nodes and groups play no part.
  BalancePolicy policy = BalancePolicy::best;
};

// One layer's placement and what it makes of the loads, each expert's shared equally by its replicas.
struct BalancedLayer {
  std::vector<int> physical_to_logical;  // expert of each slot, [slots]
  // Slots of each expert, [experts][as many as the most replicated expert of any layer has], padded
  // with -1. Under `reference` in the order in which it made the replicas, else ascending.
  std::vector<std::vector<int>> logical_to_physical;
  std::vector<int> replicas;       // slots of each expert, [experts]
  std::vector<double> rank_loads;  // [ranks]
  double imbalance = 1.0;          // largest rank load / mean; 1 if there is no load

  [[nodiscard]] Placement placement() const;
};

// Places the experts of every layer by the loads [layers][experts] they had (tokens, say: any unit).
// `from`, if given, is where they are now, [layers]: `best` stays with what is as good already, and
// else numbers slots and ranks as keep_in_place() does; `reference` has one answer only. `best` puts two replicas of one expert on
// one rank only where ranks have more slots than there are experts for them, or where the reference
// does and would else have the lower largest load.
// Throws bad_argument: no layer, rows of different length, a load that is negative, not finite or
// beyond fp32, or a config that cannot be, saying what is allowed.
[[nodiscard]] std::vector<BalancedLayer> balance(const std::vector<std::vector<double>>& loads,
                                                 const BalanceConfig& config,
                                                 std::span<const Placement> from = {});

// The load of each rank, [ranks], and max / mean of them, under any placement.
[[nodiscard]] std::vector<double> rank_loads(const Placement& placement,
                                             std::span<const double> loads);
[[nodiscard]] double imbalance(std::span<const double> rank_loads) noexcept;

// `to`, renumbered so that the fewest weights travel between ranks on the way from `from`, then the
// fewest inside them: if all have equally many slots ranks trade their sets of experts (those of
// one of `nodes` all together), and a rank keeps what it has in the slot that has it. Loads only
// change places. Throws bad_argument unless both have the same experts and ranks, and nodes divides
// the ranks.
[[nodiscard]] Placement keep_in_place(const Placement& from, const Placement& to, int nodes = 1);

// One weight to copy: what from_slot holds under the old placement, to_slot holds under the new.
struct Move {
  int expert;
  int from_slot;
  int to_slot;
  int from_rank;
  int to_rank;

  [[nodiscard]] bool travels() const noexcept { return from_rank != to_rank; }
  [[nodiscard]] bool operator==(const Move&) const = default;
};

// The copies that turn `from` into `to`: one for each slot (the i-th of its rank) that gets another
// expert, from the nearest place that has it, and of equally near ranks the one that sends least so
// far. Nearest first: inside a rank, inside one of `nodes`, between nodes. All are to be read before
// any is overwritten. Throws bad_argument unless both have the same experts and ranks, and nodes
// divides the ranks.
[[nodiscard]] std::vector<Move> moves(const Placement& from, const Placement& to, int nodes = 1);

}  // namespace wherry
