// Layout `tokens`: gather, MLP, and the sum over the choices of a row, for every implementation.
#include <algorithm>

#include "unit/experts/cases.hpp"

namespace wherry::test {
namespace {

// What dispatch would give: rows with up to topk choices, some elsewhere, segments padded.
struct Gathered {
  std::vector<std::int64_t> counts, begin;
  std::vector<Received::TokenChoice> choices;
  std::vector<std::int32_t> gather;
};

Gathered make_gathered(std::int64_t rows, int topk, int slots, std::int64_t alignment) {
  std::mt19937 random(17);
  Gathered result;
  result.counts.assign(static_cast<std::size_t>(slots), 0);
  for (std::int64_t i = 0; i < rows * topk; ++i) {
    // Slot -1 is elsewhere; the last slot stays empty; a slot may come twice in a row.
    const int slot = static_cast<int>(random() % static_cast<unsigned>(slots)) - 1;
    result.choices.push_back({slot, static_cast<float>(random() % 1000) / 700.0F - 0.3F, -1});
    if (slot >= 0) ++result.counts[static_cast<std::size_t>(slot)];
  }
  result.begin.push_back(0);
  for (const std::int64_t count : result.counts) {
    result.begin.push_back(result.begin.back() + (count + alignment - 1) / alignment * alignment);
  }
  result.gather.assign(static_cast<std::size_t>(result.begin.back()), -1);
  std::vector<std::int64_t> next = result.begin;
  for (std::size_t i = 0; i < result.choices.size(); ++i) {
    Received::TokenChoice& choice = result.choices[i];
    if (choice.local_slot < 0) continue;
    choice.position =
        static_cast<std::int32_t>(next[static_cast<std::size_t>(choice.local_slot)]++);
    result.gather[static_cast<std::size_t>(choice.position)] =
        static_cast<std::int32_t>(i / static_cast<std::size_t>(topk));
  }
  return result;
}

TEST_P(GatedMlpTest, GatheredEqualsGroupedAndASumInKOrderBitForBit) {
  const int topk = 5, slots = 4;
  const std::int64_t rows = 301, hidden = 77;
  const SyntheticExperts experts{.seed = 2, .hidden = hidden, .expert_hidden = 50};
  const std::vector<int> local = {3, 9, 1, 7};
  for (const int num_threads : {1, 3}) {
    GatedMlp mlp(config(experts, num_threads), local, experts.source());
    const Gathered g = make_gathered(rows, topk, slots, 4);
    const Rows x(dtype(), rows, hidden, 12), y(dtype(), rows, hidden, 12);
    fill_synthetic_tokens(1, 0, x.view());
    mlp.forward_gathered(received_tokens(x.view(), g.counts, g.begin, g.choices, g.gather),
                         y.view());

    const Rows grouped(dtype(), g.begin.back(), hidden), results(dtype(), g.begin.back(), hidden);
    for (std::size_t at = 0; at < g.gather.size(); ++at) {
      if (g.gather[at] < 0) continue;
      std::ranges::copy(x.row(g.gather[at]), grouped.view().row(static_cast<std::int64_t>(at)));
    }
    mlp.forward(grouped.view(), g.begin, g.counts, results.view());
    for (std::int64_t row = 0; row < rows; ++row) {
      for (std::int64_t h = 0; h < hidden; ++h) {
        float sum = 0.0F;
        for (int k = 0; k < topk; ++k) {
          const auto& choice = g.choices[static_cast<std::size_t>(row * topk + k)];
          if (choice.local_slot < 0) continue;
          sum = std::fma(choice.weight, results.at(choice.position, h), sum);
        }
        const float expected = dtype() == DType::bf16 ? bf16_to_float(float_to_bf16(sum)) : sum;
        ASSERT_EQ(y.at(row, h), expected) << "row " << row << ", column " << h;
      }
    }
  }
}

TEST_P(GatedMlpTest, GatheredRefusesIndicesOutOfRange) {
  const SyntheticExperts experts{.seed = 2, .hidden = 8, .expert_hidden = 8};
  const std::vector<int> local = {0};
  GatedMlp mlp(config(experts), local, experts.source());
  const Rows x(dtype(), 2, 8), y(dtype(), 2, 8);
  fill_synthetic_tokens(1, 0, x.view());
  const std::vector<std::int64_t> counts = {1}, begin = {0, 1};
  const std::vector<std::int32_t> good = {1}, bad = {2};
  const std::vector<Received::TokenChoice> choices = {{-1, 1.0F, -1}, {0, 1.0F, 0}};
  const std::vector<Received::TokenChoice> outside = {{-1, 1.0F, -1}, {0, 1.0F, 1}};
  Received received = received_tokens(x.view(), counts, begin, choices, bad);
  EXPECT_THROW(mlp.forward_gathered(received, y.view()), Error);
  received.gather = good;
  received.choices = outside;
  EXPECT_THROW(mlp.forward_gathered(received, y.view()), Error);
  received.choices = choices;
  mlp.forward_gathered(received, y.view());
  for (std::int64_t h = 0; h < 8; ++h) EXPECT_EQ(y.at(0, h), 0.0F);  // no choice here: exactly 0
}

}  // namespace
}  // namespace wherry::test
