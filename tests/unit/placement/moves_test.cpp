// From one placement to the next: the copies are right, and no renumbering needs fewer.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

#include "wherry/placement.hpp"

namespace wherry::test {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

std::vector<int> even_begin(int ranks, int per_rank) {
  std::vector<int> begin;
  for (int r = 0; r <= ranks; ++r) begin.push_back(r * per_rank);
  return begin;
}

Placement place(int experts, std::vector<int> slots, int ranks) {
  const int per_rank = static_cast<int>(slots.size()) / ranks;
  return Placement::from_slots(experts, std::move(slots), even_begin(ranks, per_rank));
}

Placement random_placement(int experts, int ranks, int per_rank, std::mt19937& random) {
  std::vector<int> slots(static_cast<std::size_t>(ranks * per_rank));
  for (std::size_t s = 0; s < slots.size(); ++s) {
    slots[s] = s < static_cast<std::size_t>(experts)
                   ? static_cast<int>(s)
                   : static_cast<int>(random() % static_cast<unsigned>(experts + 1)) - 1;
  }
  std::shuffle(slots.begin(), slots.end(), random);
  return place(experts, std::move(slots), ranks);
}

// What each slot holds after the moves, all read before any is written. New slots begin empty.
std::vector<int> replay(const Placement& from, const Placement& to, const std::vector<Move>& list) {
  std::vector<int> memory(static_cast<std::size_t>(to.num_slots()), -1);
  for (int r = 0; r < to.num_ranks(); ++r) {
    const auto rank = static_cast<std::size_t>(r);
    const auto first = from.slot_to_expert().begin() + from.slot_begin()[rank];
    std::copy_n(first, std::min(from.num_local_slots(r), to.num_local_slots(r)),
                memory.begin() + to.slot_begin()[rank]);
  }
  for (const Move& move : list) {
    const auto source = static_cast<std::size_t>(move.from_slot);
    const auto target = static_cast<std::size_t>(move.to_slot);
    EXPECT_EQ(from.slot_to_expert()[source], move.expert);
    EXPECT_EQ(from.slot_to_rank()[source], move.from_rank);
    EXPECT_EQ(to.slot_to_rank()[target], move.to_rank);
    EXPECT_NE(memory[target], move.expert) << "a copy for nothing";
    memory[target] = move.expert;
  }
  return memory;
}

TEST(Moves, AreNoneWithoutAChange) {
  const Placement placement = Placement::contiguous(10, 3);
  EXPECT_THAT(moves(placement, placement), IsEmpty());
  EXPECT_EQ(keep_in_place(placement, placement), placement);
}

TEST(Moves, NameExpertSlotsAndRanks) {
  const Placement from = place(4, {0, 1, 2, 3}, 2), to = place(4, {0, 2, 3, 1}, 2);
  EXPECT_THAT(moves(from, to),
              ElementsAre(Move{3, 3, 2, 1, 1}, Move{2, 2, 1, 1, 0}, Move{1, 1, 3, 0, 1}));
}

TEST(Moves, TurnTheOldPlacementIntoTheNewAndComeNearestFirst) {
  std::mt19937 random(1);
  for (int repeat = 0; repeat < 500; ++repeat) {
    const Placement from = random_placement(7, 4, 2 + repeat % 3, random);
    const Placement to = random_placement(7, 4, 2 + repeat % 2, random);
    const std::vector<Move> list = moves(from, to, 2);
    const std::vector<int> memory = replay(from, to, list);
    for (std::size_t s = 0; s < memory.size(); ++s) {
      ASSERT_TRUE(to.slot_to_expert()[s] < 0 || memory[s] == to.slot_to_expert()[s]);
    }
    const auto distance = [](const Move& move) {
      if (!move.travels()) return 0;
      return move.from_rank / 2 == move.to_rank / 2 ? 1 : 2;
    };
    for (std::size_t i = 0; i < list.size(); ++i) {
      ASSERT_TRUE(i == 0 || distance(list[i - 1]) <= distance(list[i]));
      for (const int slot : from.slots_of(list[i].expert)) {
        const Move other{list[i].expert, slot, list[i].to_slot,
                         from.slot_to_rank()[static_cast<std::size_t>(slot)], list[i].to_rank};
        ASSERT_LE(distance(list[i]), distance(other)) << "a nearer place has it";
      }
    }
  }
}

TEST(Moves, ShareTheSendingAmongRanksThatHoldTheSame) {
  const Placement from = place(3, {0, 1, 0, 1, 2, 2, 2, 2}, 4);
  const Placement to = place(3, {0, 1, 0, 1, 2, 0, 2, 1}, 4);
  EXPECT_THAT(moves(from, to), ElementsAre(Move{0, 0, 5, 0, 2}, Move{1, 3, 7, 1, 3}));
}

TEST(KeepInPlace, UndoesAnyRenumberingOfSlotsAndRanks) {
  const Placement from = place(8, {0, 1, 2, 3, 4, 5, 6, 7}, 4);
  EXPECT_EQ(keep_in_place(from, place(8, {7, 6, 1, 0, 5, 4, 2, 3}, 4)), from);
  // Over two nodes the pairs of ranks stay together.
  EXPECT_EQ(keep_in_place(from, place(8, {7, 6, 5, 4, 3, 2, 0, 1}, 4), 2), from);
  EXPECT_NE(keep_in_place(from, place(8, {7, 6, 1, 0, 5, 4, 2, 3}, 4), 2), from);
}

int travelling(const Placement& from, const Placement& to) {
  int count = 0;
  for (int r = 0; r < to.num_ranks(); ++r) {
    std::vector<int> has, needs, missing;
    for (int s = 0; s < from.num_slots(); ++s)
      if (from.slot_to_rank()[static_cast<std::size_t>(s)] == r)
        has.push_back(from.slot_to_expert()[static_cast<std::size_t>(s)]);
    for (int s = 0; s < to.num_slots(); ++s)
      if (to.slot_to_rank()[static_cast<std::size_t>(s)] == r &&
          to.slot_to_expert()[static_cast<std::size_t>(s)] >= 0)
        needs.push_back(to.slot_to_expert()[static_cast<std::size_t>(s)]);
    std::sort(has.begin(), has.end());
    std::sort(needs.begin(), needs.end());
    needs.erase(std::unique(needs.begin(), needs.end()), needs.end());
    std::set_difference(needs.begin(), needs.end(), has.begin(), has.end(),
                        std::back_inserter(missing));
    count += static_cast<int>(missing.size());
  }
  return count;
}

// Every order of the ranks that keeps those of a node together.
int fewest_by_trial(const Placement& from, const Placement& to, int nodes) {
  const int ranks = to.num_ranks(), per_rank = to.num_local_slots(0), size = ranks / nodes;
  std::vector<int> order(static_cast<std::size_t>(ranks));
  std::iota(order.begin(), order.end(), 0);
  int fewest = to.num_slots() + 1;
  do {
    bool together = true;
    for (auto node = order.begin(); node != order.end(); node += size)
      together = together &&
                 std::all_of(node, node + size, [&](int as) { return as / size == *node / size; });
    if (!together) continue;
    std::vector<int> slots;
    for (const int as : order) {
      const auto first = to.slot_to_expert().begin() + std::ptrdiff_t{as} * per_rank;
      slots.insert(slots.end(), first, first + per_rank);
    }
    fewest = std::min(fewest, travelling(from, place(to.num_experts(), slots, ranks)));
  } while (std::next_permutation(order.begin(), order.end()));
  return fewest;
}

TEST(KeepInPlace, LetsTheFewestWeightsTravelOfAllRenumberings) {
  std::mt19937 random(2);
  for (int repeat = 0; repeat < 100; ++repeat) {
    const int nodes = 1 + repeat % 3, ranks = nodes == 3 ? 6 : 4;
    const Placement from = random_placement(9, ranks, 3, random);
    const Placement to = random_placement(9, ranks, 3, random);
    const Placement kept = keep_in_place(from, to, nodes);
    ASSERT_EQ(travelling(from, kept), fewest_by_trial(from, to, nodes)) << "repeat " << repeat;
  }
}

TEST(KeepInPlace, OnlyReordersSlotsInsideRanksOfUnequalSize) {
  const Placement from = Placement::from_slots(5, {0, 1, 2, 3, 4}, {0, 3, 5});
  const Placement to = Placement::from_slots(5, {2, 0, 3, 1, 4}, {0, 3, 5});
  EXPECT_THAT(keep_in_place(from, to).slot_to_expert(), ElementsAre(0, 3, 2, 1, 4));
}

TEST(KeepInPlace, LowersWhatBalanceMovesAndChangesNoLoad) {
  std::mt19937 random(3);
  std::vector<double> loads(64);
  for (double& load : loads) load = static_cast<double>(random() % 1000);
  const BalanceConfig config{.ranks = 8, .nodes = 2, .slots = 80, .groups = 4};
  const Placement from = balance({loads}, config)[0].placement();
  for (double& load : loads) load += static_cast<double>(random() % 50);
  const BalancedLayer fresh = balance({loads}, config)[0];
  const std::vector<Placement> now = {from};
  const BalancedLayer kept = balance({loads}, config, now)[0];
  EXPECT_DOUBLE_EQ(kept.imbalance, fresh.imbalance);
  EXPECT_LT(travelling(from, kept.placement()), travelling(from, fresh.placement()));
  EXPECT_EQ(balance({loads}, config, std::vector{kept.placement()})[0].physical_to_logical,
            kept.physical_to_logical);
}

TEST(KeepInPlace, StaysWithAPlacementThatIsAsGood) {
  std::mt19937 random(4);
  std::vector<double> loads(24);
  for (double& load : loads) load = static_cast<double>(random() % 1000);
  const BalanceConfig config{.ranks = 4, .nodes = 2, .slots = 32, .groups = 4};
  const std::vector<Placement> good = {balance({loads}, config)[0].placement()};
  EXPECT_EQ(balance({loads}, config, good)[0].placement(), good[0]);
  // As even, but a group would be on two nodes: not good enough.
  const std::vector<double> even(24, 1.0);
  const BalanceConfig no_replicas{.ranks = 4, .nodes = 2, .slots = 24, .groups = 4};
  std::vector<int> shuffled(24);
  std::iota(shuffled.begin(), shuffled.end(), 0);
  std::swap(shuffled[0], shuffled[23]);
  const std::vector<Placement> astray = {place(24, shuffled, 4)};
  EXPECT_NE(balance({even}, no_replicas, astray)[0].placement(), astray[0]);
}

}  // namespace
}  // namespace wherry::test
