// Long runs, cut short; `make soak` runs them at full length.
#include <gtest/gtest.h>

#include <iostream>

#include "support/endurance.hpp"

namespace wherry::test {
namespace {

void nobody_listens(std::int64_t) {}

TEST(Endurance, SurvivorsOfKilledRanksGoOnAndNothingIsLeft) {
  EXPECT_NO_THROW(std::cout << run_killed_rounds(40, 1, nobody_listens) << '\n');
}

TEST(Endurance, SurvivorsOfLateRanksGoOnInTheSameProcesses) {
  EXPECT_NO_THROW(std::cout << run_late_rounds(15, 2, nobody_listens) << '\n');
}

TEST(Endurance, DecodeStepsStayTheSameAndMemoryStaysFlat) {
  EXPECT_NO_THROW(std::cout << run_decode_steps(20'000, nobody_listens) << '\n');
}

}  // namespace
}  // namespace wherry::test
