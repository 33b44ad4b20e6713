// Loads and shapes that cannot be: what was wrong and what is allowed.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "wherry/error.hpp"
#include "wherry/placement.hpp"

namespace wherry::test {
namespace {

std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::bad_argument);
    EXPECT_EQ(error.stage(), Stage::placement);
    return error.message();
  }
  return "accepted";
}

std::string refusal(const std::vector<std::vector<double>>& loads, const BalanceConfig& config) {
  return refusal([&] { static_cast<void>(balance(loads, config)); });
}

const std::vector<std::vector<double>> kGood = {{1, 2, 3, 4, 5, 6}};

TEST(BalanceErrors, NameTheLoadAndWhatIsAllowed) {
  const BalanceConfig config{.ranks = 2, .slots = 8};
  EXPECT_EQ(refusal({}, config), "loads has no layer; it needs at least one row");
  EXPECT_EQ(refusal({{}}, config), "loads[0] has 0 experts; it must have 1..65536");
  EXPECT_EQ(refusal({{1, 2}, {1}}, config),
            "loads[1] has 1 experts and loads[0] has 2; every layer needs the same number");
  EXPECT_EQ(refusal({{1, 2}, {1, -3}}, config),
            "loads[1][1] is -3; a load must be finite and at least 0");
  const double nan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_EQ(refusal({{nan, 2}}, config),
            "loads[0][0] is nan; a load must be finite and at least 0");
  const double inf = std::numeric_limits<double>::infinity();
  EXPECT_EQ(refusal({{1, inf}}, config),
            "loads[0][1] is inf; a load must be finite and at least 0");
  EXPECT_EQ(refusal({{1, 1e39}}, config),
            "loads[0][1] is 1e+39; a load must be at most 3.4028235e+38");
}

TEST(BalanceErrors, NameTheFieldOfTheConfigAndWhatIsAllowed) {
  EXPECT_EQ(refusal(kGood, {.ranks = 0, .slots = 8}), "ranks is 0; it must be at least 1");
  EXPECT_EQ(refusal(kGood, {.ranks = 2, .nodes = 0, .slots = 8}),
            "nodes is 0; it must be at least 1");
  EXPECT_EQ(refusal(kGood, {.ranks = 2, .slots = 4}), "slots is 4; 6 experts need 6..65536");
  EXPECT_EQ(refusal(kGood, {.ranks = 3, .slots = 8}),
            "slots is 8; it must be a multiple of ranks (3)");
  EXPECT_EQ(refusal(kGood, {.ranks = 2, .slots = 8, .groups = 4}),
            "groups is 4; it must divide the number of experts (6)");
  EXPECT_EQ(refusal(kGood, {.ranks = 2, .slots = 8, .groups = 0}),
            "groups is 0; it must divide the number of experts (6)");
  EXPECT_EQ(refusal(kGood, {.ranks = 2, .nodes = 3, .slots = 8, .groups = 3}),
            "nodes is 3; with groups (3) a multiple of it, it must divide ranks (2) too");
  EXPECT_EQ(refusal({std::vector<double>(2000, 1.0)}, {.ranks = 40000, .slots = 40000}),
            "2000 experts on 40000 ranks; their product may be at most 67108864");
}

TEST(BalanceErrors, NamePlacementsThatDoNotFitTogether) {
  const Placement six = Placement::contiguous(6, 2), four = Placement::contiguous(4, 2);
  const std::vector<Placement> one = {six};
  EXPECT_EQ(refusal([&] {
              static_cast<void>(balance({kGood[0], kGood[0]}, {.ranks = 2, .slots = 8}, one));
            }),
            "from has 1 placements; it needs one for each of the 2 layers of loads");
  const std::vector<Placement> other = {Placement::contiguous(8, 2)};
  EXPECT_EQ(refusal([&] { static_cast<void>(balance(kGood, {.ranks = 2, .slots = 8}, other)); }),
            "from has 8 experts and to has 6; they must be the same");
  EXPECT_EQ(refusal([&] { static_cast<void>(moves(six, four)); }),
            "from has 6 experts and to has 4; they must be the same");
  EXPECT_EQ(refusal([&] { static_cast<void>(moves(six, Placement::contiguous(6, 3))); }),
            "from has 2 ranks and to has 3; they must be the same");
  EXPECT_EQ(refusal([&] { static_cast<void>(keep_in_place(six, six, 3)); }),
            "nodes is 3; it must divide the number of ranks (2)");
  EXPECT_EQ(refusal([&] { static_cast<void>(rank_loads(six, std::vector<double>(5))); }),
            "loads has 5 entries; the placement has 6 experts");
}

}  // namespace
}  // namespace wherry::test
