// The default width of the experts: a power of two that fits.
#include "experts/expert_hidden.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "wherry/error.hpp"

namespace wherry::test {
namespace {

using ::testing::HasSubstr;
constexpr std::uint64_t kPlenty = 1'000'000'000'000;

TEST(ExpertHidden, IsTheLargestPowerOfTwoWithinFourGigabytes) {
  const ExpertHidden chosen =
      default_expert_hidden(find_model("deepseek-v3"), DType::bf16, kPlenty);
  EXPECT_EQ(chosen.value, 256);  // 2.8 GB; 512 would be 5.6
  EXPECT_THAT(chosen.sentence, HasSubstr("2.8 GB"));
  EXPECT_THAT(chosen.sentence, HasSubstr("2048"));
}

TEST(ExpertHidden, NeverExceedsTheModels) {
  for (const Model& model : models()) {
    const std::int64_t value = default_expert_hidden(model, DType::bf16, kPlenty).value;
    EXPECT_LE(value, model.expert_hidden) << model.name;
    EXPECT_EQ(value & (value - 1), 0) << model.name;
    EXPECT_LE(expert_weight_bytes(model.experts, model.hidden, value, DType::bf16), 4'000'000'000U);
  }
}

TEST(ExpertHidden, TakesHalfOfTheMemoryAtMost) {
  const ExpertHidden chosen =
      default_expert_hidden(find_model("deepseek-v3"), DType::bf16, 3'000'000'000);
  EXPECT_EQ(chosen.value, 128);
  EXPECT_THAT(chosen.sentence, HasSubstr("half of the 3.0 GB"));
}

TEST(ExpertHidden, SaysSoWhenNothingFits) {
  try {
    (void)default_expert_hidden(find_model("deepseek-v3"), DType::bf16, 10'000'000);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::out_of_memory);
    EXPECT_THAT(error.what(), HasSubstr("half of the 0.0 GB"));
  }
}

TEST(ExpertHidden, KnowsTheMemoryOfThisMachine) {
  EXPECT_GT(available_memory(), 1'000'000U);
  EXPECT_LT(available_memory(), std::uint64_t{1} << 50);
}

}  // namespace
}  // namespace wherry::test
