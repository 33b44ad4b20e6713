// Random configurations, a few hundred; `make soak` runs ten thousand of them and more.
#include <gtest/gtest.h>

#include "support/random_case.hpp"

namespace wherry::test {
namespace {

constexpr std::uint64_t kBlock = 50;

class RandomConfigurations : public ::testing::TestWithParam<std::uint64_t> {};

TEST_P(RandomConfigurations, RunAndVerify) {
  for (std::uint64_t seed = GetParam(); seed < GetParam() + kBlock; ++seed) {
    const RandomCase random = random_case(seed);
    SCOPED_TRACE(random.text());
    ASSERT_NO_THROW(run_case(random));
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, RandomConfigurations, ::testing::Values(0, 50, 100, 150, 200, 250));

}  // namespace
}  // namespace wherry::test
