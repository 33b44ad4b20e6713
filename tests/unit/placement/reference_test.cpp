// The reference policy: the tables that EPLB publishes, and what follows from them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "wherry/placement.hpp"

namespace wherry::test {
namespace {

using ::testing::ElementsAre;
using ::testing::ElementsAreArray;

const std::vector<std::vector<double>> kPublishedLoads = {
    {90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86},
    {20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27}};

BalanceConfig published(int groups) {
  return {
      .ranks = 8, .nodes = 2, .slots = 16, .groups = groups, .policy = BalancePolicy::reference};
}

TEST(ReferencePolicy, GivesThePublishedTables) {
  const auto layers = balance(kPublishedLoads, published(4));
  ASSERT_EQ(layers.size(), 2U);
  EXPECT_THAT(layers[0].physical_to_logical,
              ElementsAre(5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1));
  EXPECT_THAT(layers[1].physical_to_logical,
              ElementsAre(7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1));
  EXPECT_THAT(layers[0].replicas, ElementsAre(1, 2, 1, 1, 2, 2, 1, 1, 1, 1, 2, 1));
  EXPECT_THAT(layers[1].replicas, ElementsAre(1, 2, 1, 1, 1, 2, 2, 1, 2, 1, 1, 1));
  EXPECT_THAT(layers[0].rank_loads, ElementsAre(121.5, 86.5, 125, 113, 147.5, 131.5, 156, 152));
  EXPECT_THAT(layers[1].rank_loads, ElementsAre(173, 179.5, 120.5, 172, 123, 152, 118.5, 117.5));
  EXPECT_DOUBLE_EQ(layers[0].imbalance, 156 * 8 / 1033.0);
}

TEST(ReferencePolicy, ListsTheSlotsOfAnExpertInTheOrderOfItsReplicas) {
  const auto layers = balance(kPublishedLoads, published(4));
  EXPECT_THAT(
      layers[0].logical_to_physical,
      ElementsAre(ElementsAre(12, -1), ElementsAre(15, 13), ElementsAre(11, -1), ElementsAre(6, -1),
                  ElementsAre(7, 5), ElementsAre(0, 2), ElementsAre(1, -1), ElementsAre(3, -1),
                  ElementsAre(4, -1), ElementsAre(9, -1), ElementsAre(8, 10), ElementsAre(14, -1)));
  EXPECT_THAT(layers[1].logical_to_physical[6], ElementsAre(2, 4));
}

TEST(ReferencePolicy, IgnoresNodesThatTheGroupsDoNotFit) {
  const auto layers = balance(kPublishedLoads, published(3));
  EXPECT_THAT(layers[0].physical_to_logical,
              ElementsAre(10, 6, 10, 7, 0, 2, 11, 4, 5, 9, 5, 4, 8, 3, 1, 1));
  EXPECT_THAT(layers[1].physical_to_logical,
              ElementsAre(1, 10, 2, 4, 5, 11, 5, 0, 6, 7, 6, 3, 8, 8, 9, 7));
  EXPECT_EQ(
      balance(kPublishedLoads, {.ranks = 8, .slots = 16, .policy = BalancePolicy::reference})[0]
          .physical_to_logical,
      layers[0].physical_to_logical);
}

// One item a pack stays where it is, whatever it weighs.
TEST(ReferencePolicy, LeavesOneSlotARankInOrder) {
  const auto layers =
      balance({{1, 9, 5, 7}}, {.ranks = 4, .slots = 4, .policy = BalancePolicy::reference});
  EXPECT_THAT(layers[0].physical_to_logical, ElementsAre(0, 1, 2, 3));
}

TEST(ReferencePolicy, BreaksTiesTowardsTheLowestIndex) {
  const auto layers = balance({{2, 2, 2, 2, 0, 0}, {0, 0, 0, 0, 0, 0}},
                              {.ranks = 4, .slots = 8, .policy = BalancePolicy::reference});
  EXPECT_THAT(layers[0].replicas, ElementsAre(2, 2, 1, 1, 1, 1));
  EXPECT_THAT(layers[1].replicas, ElementsAre(3, 1, 1, 1, 1, 1));
  EXPECT_THAT(layers[1].physical_to_logical, ElementsAre(0, 1, 2, 3, 4, 5, 0, 0));
}

TEST(ReferencePolicy, PadsToTheMostReplicatedExpertOfAnyLayer) {
  const auto layers = balance({{1, 1, 1, 1}, {9, 1, 1, 1}},
                              {.ranks = 2, .slots = 6, .policy = BalancePolicy::reference});
  EXPECT_THAT(layers[0].logical_to_physical[3].size(), 3U);
  EXPECT_THAT(layers[1].replicas, ElementsAre(3, 1, 1, 1));
  const std::vector<int> padded = {layers[0].logical_to_physical[3][0], -1, -1};
  EXPECT_THAT(layers[0].logical_to_physical[3], ElementsAreArray(padded));
}

}  // namespace
}  // namespace wherry::test
