// The oneDNN implementation: the shared suite, and its bf16 beside the plain one's.
#include "unit/experts/cases.hpp"

namespace wherry::test {

INSTANTIATE_TEST_SUITE_P(Onednn, GatedMlpTest, ::testing::Values(Kind{"onednn", DType::bf16}),
                         kind_name);

namespace {

TEST(OnednnExperts, TakeLittleMoreThanTheWeights) {
  const SyntheticExperts experts{.seed = 1, .hidden = 1024, .expert_hidden = 256};
  const std::vector<int> local = {0, 1};
  const GatedMlp mlp({.hidden = 1024, .expert_hidden = 256}, local, experts.source());
  const std::uint64_t plain = 2 * 3 * 1024 * 256 * sizeof(std::uint16_t);
  EXPECT_GE(mlp.weight_bytes(), plain);
  EXPECT_LE(mlp.weight_bytes(), plain + plain / 16);
}

}  // namespace
}  // namespace wherry::test
