#include "group/bind.hpp"

#include <gtest/gtest.h>
#include <sched.h>

#include <map>
#include <numeric>

#include "group/state.hpp"
#include "wherry/group.hpp"

namespace wherry {
namespace {

TEST(Bind, EveryRankGetsAProcessorAndNoProcessorIsLeftWhileThereAreEnoughRanks) {
  for (int ranks = 1; ranks <= 9; ++ranks) {
    for (int count = 1; count <= 9; ++count) {
      std::vector<int> cpus(static_cast<std::size_t>(count));
      std::iota(cpus.begin(), cpus.end(), 100);
      std::map<int, int> users;
      for (int rank = 0; rank < ranks; ++rank) {
        const std::vector<int> mine = share_of_cpus(cpus, rank, ranks);
        ASSERT_FALSE(mine.empty());
        for (const int cpu : mine) ++users[cpu];
      }
      EXPECT_EQ(users.size(), cpus.size()) << ranks << " ranks, " << count << " processors";
      // Shared evenly: no processor serves two ranks more than another.
      for (const auto& [cpu, number] : users) EXPECT_LE(number, (ranks + count - 1) / count);
    }
  }
}

#if WHERRY_HAS_NUMA
TEST(Bind, NeighboursInRankAreNeighboursInTheTopology) {
  // Processor numbers interleave over the two nodes, as firmware often does.
  const std::vector<int> cpus = usable_cpus("numa:2 core:4 pu:1(indexes=0,2,4,6,1,3,5,7)");
  ASSERT_EQ(cpus.size(), 8U);
  std::vector<int> first_node = share_of_cpus(cpus, 0, 2);
  EXPECT_EQ(first_node, (std::vector<int>{0, 2, 4, 6}));
}
#endif

TEST(Bind, RanksOfALauncherAreBoundAndTheCallerIsNot) {
  const std::vector<int> before = usable_cpus();
  run_threads(2, [&](Group& group) {
    if (usable_cpus() != share_of_cpus(before, group.rank(), 2)) {
      throw std::runtime_error("a rank is not on its share");
    }
  });
  EXPECT_EQ(usable_cpus(), before);
}

TEST(Bind, ARankKnowsWhoSharesItsOnlyProcessor) {
  const int processors = static_cast<int>(usable_cpus().size());
  run_threads(3 * processors, [&](Group& group) {
    const std::vector<bool>& beside = group.state().beside;
    for (int peer = 0; peer < group.size(); ++peer) {
      const bool same = peer != group.rank() && peer / 3 == group.rank() / 3;
      if (beside.at(static_cast<std::size_t>(peer)) != same) throw std::runtime_error("beside");
    }
  });
  run_threads(1, [&](Group& group) {
    if (group.state().beside.at(0)) throw std::runtime_error("beside itself");
  });
}

}  // namespace
}  // namespace wherry
