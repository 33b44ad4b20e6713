// Plans of random groups: nothing is lost, nothing lies on another, everything is where the design
// says. A failure names the seed of its case.
#include <gtest/gtest.h>

#include <array>
#include <random>

#include "support/plan_checks.hpp"

namespace wherry::test {
namespace {

Numbers numbers_of(std::mt19937_64& random) {
  return [&random](std::int64_t least, std::int64_t most) {
    return std::uniform_int_distribution<std::int64_t>(least, most)(random);
  };
}

struct Seen {
  int planned = 0;
  int refused = 0;
  int dropping = 0;
};

Seen check_seeds(Layout layout, std::uint64_t first, int count) {
  Seen seen;
  std::uint64_t seed = first;
  while (seen.planned + seen.refused < count) {
    std::mt19937_64 random(seed++);
    const Numbers any = numbers_of(random);
    PlanCase c = any_case(any);
    if (c.config.layout != layout) continue;
    for (int rank = 0; rank < c.ranks; ++rank) {
      const bool leads = rank % c.config.replicated == 0;
      c.routings.push_back(leads ? any_routing(any, c.config, c.ranks)
                                 : same_routing(c.routings.back()));
    }
    try {
      const Planned planned = plan_group(c);
      PlanChecker(c, planned).check();
      const bool refused = planned.errors[0].has_value();
      ++(refused ? seen.refused : seen.planned);
      const auto drops = [](const PlanData& plan) {
        return std::ranges::any_of(plan.dropped, [](std::int64_t rows) { return rows > 0; });
      };
      if (!refused && std::ranges::any_of(planned.plans, drops)) ++seen.dropping;
    } catch (const std::exception& error) {
      ADD_FAILURE() << "seed " << seed - 1 << ": " << error.what();
      break;
    }
  }
  return seen;
}

TEST(PlanProperties, GroupedRowsAreAlignedInOrderAndNoneIsLost) {
  const Seen seen = check_seeds(Layout::grouped, 1, 4000);
  EXPECT_GT(seen.planned, 1000);
  EXPECT_GT(seen.refused, 100);
  EXPECT_GT(seen.dropping, 100);
}

TEST(PlanProperties, SlotsRowsStayInTheirSlotsAndNoneIsLost) {
  const Seen seen = check_seeds(Layout::slots, 100'000, 4000);
  EXPECT_GT(seen.planned, 1000);
  EXPECT_GT(seen.refused, 100);
  EXPECT_GT(seen.dropping, 100);
}

TEST(PlanProperties, TokenRowsComeOncePerRankInOrder) {
  const Seen seen = check_seeds(Layout::tokens, 200'000, 4000);
  EXPECT_GT(seen.planned, 1000);
  EXPECT_GT(seen.refused, 100);
}

}  // namespace
}  // namespace wherry::test
