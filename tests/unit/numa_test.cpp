#include "group/numa.hpp"

#include <gtest/gtest.h>

#include <numeric>

namespace wherry {
namespace {

TEST(Numa, EveryRankGetsANodeAndEveryNodeARankWhileThereAreEnough) {
  for (int ranks = 1; ranks <= 9; ++ranks) {
    for (int nodes = 1; nodes <= 9; ++nodes) {
      std::vector<int> users(static_cast<std::size_t>(nodes), 0);
      for (int rank = 0; rank < ranks; ++rank) {
        const std::vector<int> mine = nodes_of_rank(rank, ranks, nodes);
        ASSERT_FALSE(mine.empty());
        for (const int node : mine) ++users[static_cast<std::size_t>(node)];
      }
      for (const int count : users) EXPECT_GE(count, 1) << ranks << " ranks, " << nodes << " nodes";
    }
  }
}

#if WHERRY_HAS_NUMA
TEST(Numa, RanksOfATwoSocketMachineSplitIntoItsHalves) {
  const std::string machine = "numa:2 core:4 pu:1";
  EXPECT_EQ(bind_rank(0, 4, machine), (std::vector<int>{0, 1, 2, 3}));
  EXPECT_EQ(bind_rank(1, 4, machine), (std::vector<int>{0, 1, 2, 3}));
  EXPECT_EQ(bind_rank(2, 4, machine), (std::vector<int>{4, 5, 6, 7}));
  EXPECT_EQ(bind_rank(0, 1, machine).size(), 8U);
}

TEST(Numa, AMachineWithOneNodeIsLeftAlone) {
  EXPECT_TRUE(bind_rank(0, 2, "numa:1 core:4 pu:1").empty());
}
#endif

}  // namespace
}  // namespace wherry
