// CPU and GPU agree to the bit: layouts, reductions, types, shapes and ways of calling, over groups of
// several sizes, as processes (the product's way) and as threads that launch together.
#include <gtest/gtest.h>

#include "gpu/twin.hpp"

namespace wherry::test {
namespace {

struct Pair {
  Layout layout;
  Reduction reduction;
  SumAt sum_at;
};
constexpr Pair kPairs[] = {
    {Layout::grouped, Reduction::by_token, SumAt::home},
    {Layout::grouped, Reduction::by_rank, SumAt::home},
    {Layout::grouped, Reduction::by_rank, SumAt::expert},
    {Layout::tokens, Reduction::by_rank, SumAt::home},
    {Layout::slots, Reduction::by_token, SumAt::home},
    {Layout::slots, Reduction::by_rank, SumAt::home},
    {Layout::slots, Reduction::by_rank, SumAt::expert},
};

Case case_of(const Pair& pair, const Batch& batch, DType dtype = DType::bf16) {
  Case test{config_of(batch, pair.layout, pair.reduction, dtype), batch};
  if (pair.reduction == Reduction::by_rank && pair.layout != Layout::tokens) {
    test.config.sum_at = pair.sum_at;
  }
  return test;
}

std::vector<Case> cases_of(int ranks) {
  std::vector<Case> cases;
  const Batch plain = make_batch(23 * ranks, ranks, 13, 4, 256, 41, 0.1);
  int number = 0;
  for (const Pair& pair : kPairs) {
    // The ways of calling in turns, over every pair.
    for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
      Case test = case_of(pair, plain, dtype);
      test.halves = number % 2 == 1;
      test.own_results = number % 3 == 1;
      test.own_rows = number % 5 == 2;
      test.fused = number % 4 == 2;
      test.wide_ids = number % 4 == 3;
      test.no_weights = number % 7 == 5;
      test.config.depth = 1 + number % 3;
      test.config.kernels = number % 6 == 4 ? "cuda_copy" : number % 6 == 1 ? "cuda_link" : "";
      if (pair.layout == Layout::grouped) test.config.alignment = 1 + 3 * (number % 3);
      cases.push_back(test);
      ++number;
    }
    // One fp32 a row, a residual, more rows than there is room for.
    Case with = case_of(pair, make_batch(21 * ranks, ranks, 11, 4, 72, 55, 0.1));
    with.scalars = true;
    with.addend = true;
    with.duplicates = true;
    with.halves = pair.sum_at == SumAt::expert;
    cases.push_back(with);
    with.config.kernels = "cuda_link";
    cases.push_back(with);
    Case odd = case_of(pair, make_batch(7 * ranks, ranks, 5, 3, 35, 56, 0.1), DType::f32);
    odd.addend = true;
    cases.push_back(odd);
    if (pair.layout != Layout::tokens) {
      Case full = case_of(pair, make_batch(29 * ranks, ranks, 10, 4, 128, 57, 0.1));
      full.config.overflow = Overflow::drop;
      full.config.receive_rows = pair.layout == Layout::grouped ? 50 : 0;
      full.config.rows_per_slot = pair.layout == Layout::slots ? 9 : 0;
      if (pair.layout == Layout::grouped) full.config.alignment = 4;
      full.scalars = true;
      full.duplicates = true;
      cases.push_back(full);
      full.scalars = false;
      full.fused = true;
      cases.push_back(full);
    }
    // Rows of any size.
    for (const std::int64_t hidden : {1, 37, 2050}) {
      Case test = case_of(pair, make_batch(11 * ranks, ranks, 9, 3, hidden, 42, 0.2));
      test.own_results = hidden == 37;
      test.steps = 2;
      cases.push_back(test);
      test.config.kernels = "cuda_link";  // as over a link, whatever the ranks' GPUs
      cases.push_back(test);
    }
    // An expert twice, a caller that multiplies, ranks without tokens, ranks without experts.
    Case twice = case_of(pair, make_batch(17 * ranks, ranks, 7, 5, 64, 43, 0.1));
    twice.duplicates = true;
    cases.push_back(twice);
    twice.config.weights = Weights::caller;
    twice.fused = true;
    cases.push_back(twice);
    Case few = case_of(pair, make_batch(ranks > 1 ? ranks - 1 : 1, ranks, 5, 2, 128, 44));
    few.fused = pair.layout == Layout::slots;
    cases.push_back(few);
    cases.push_back(case_of(pair, make_batch(9, ranks, 1, 1, 16, 45)));
  }
  // Many tokens and experts: several blocks count.
  cases.push_back(case_of(kPairs[0], make_batch(2000 * ranks, ranks, 257, 8, 64, 46, 0.05)));
  cases.push_back(case_of(kPairs[3], make_batch(1500 * ranks, ranks, 64, 8, 512, 47, 0.05)));
  for (const Pair& pair : {kPairs[0], kPairs[2], kPairs[3], kPairs[4], kPairs[6]}) {
    Case link = case_of(pair, make_batch(300 * ranks, ranks, 40, 8, 1032, 58, 0.05));
    link.config.kernels = "cuda_link";
    cases.push_back(link);
    link.config.num_sms = 1;  // a warp has many tokens
    link.addend = pair.reduction == Reduction::by_rank;
    cases.push_back(link);
  }
  Case wide = case_of(kPairs[4], make_batch(30 * ranks, ranks, 70, 32, 520, 59, 0.1));
  wide.config.kernels = "cuda_link";
  cases.push_back(wide);
  cases.push_back(case_of(kPairs[1], make_batch(40, ranks, 1025, 32, 48, 48, 0.3)));
  // Replicas, and slots chosen by the caller.
  std::vector<int> slots;
  std::vector<int> begin{0};
  for (int rank = 0; rank < ranks; ++rank) {
    for (int i = 0; i < 4; ++i) slots.push_back((rank * 3 + i) % 6);
    begin.push_back(static_cast<int>(slots.size()));
  }
  for (int expert = 0; expert < 6; ++expert) slots.push_back(expert);
  begin.back() = static_cast<int>(slots.size());
  for (const Pair& pair : {kPairs[0], kPairs[3], kPairs[5]}) {
    Case test = case_of(pair, make_batch(19 * ranks, ranks, 6, 3, 96, 49, 0.1));
    test.config.placement = Placement::from_slots(6, slots, begin);
    cases.push_back(test);
    test.config.expert_ids = ExpertIds::physical;
    cases.push_back(test);
  }
  // Quantised on the way out.
  for (const Pair& pair : {kPairs[0], kPairs[3], kPairs[4]}) {
    for (const std::int64_t hidden : {256, 2064}) {
      Case test = case_of(pair, make_batch(13 * ranks, ranks, 8, 4, hidden, 50, 0.1));
      test.config.dispatch_wire = Wire::e4m3_block128;
      test.fused = pair.layout == Layout::slots;
      if (pair.layout == Layout::grouped) test.config.alignment = 8;
      cases.push_back(test);
    }
    // Over a link, where many tokens on few multiprocessors go by bulk copies.
    for (const std::int64_t hidden : {256, 2064, 3600}) {
      Case test = case_of(pair, make_batch(60 * ranks, ranks, 8, 4, hidden, 60, 0.1));
      test.config.dispatch_wire = Wire::e4m3_block128;
      test.config.kernels = "cuda_link";
      test.config.num_sms = 4;
      cases.push_back(test);
    }
  }
  // Slots over a link: of many tokens one row crosses to each rank, which fills the others from it; of few, and
  // with 8 ranks of some, every row crosses.
  for (const std::int64_t tokens : {30, 90}) {
    for (const Wire wire : {Wire::same, Wire::e4m3_block128}) {
      Case link = case_of(kPairs[6], make_batch(tokens * ranks, ranks, 12, 5, 1552, 61, 0.1));
      link.config.dispatch_wire = wire;
      link.config.kernels = "cuda_link";
      link.duplicates = true;
      link.scalars = true;
      cases.push_back(link);
      link.scalars = false;
      link.halves = true;
      cases.push_back(link);
      link.halves = false;
      link.fused = true;
      cases.push_back(link);
      link.config.num_sms = 1;
      link.config.overflow = Overflow::drop;
      link.config.rows_per_slot = tokens / 2;
      cases.push_back(link);
    }
  }
  // The same in both layouts that fill: rows without a place, padding behind what was filled, experts that multiply
  // and serve two choices, one rank with nearly all tokens.
  for (const Pair& pair : {kPairs[2], kPairs[6]}) {
    Batch batch = make_batch(90 * ranks, ranks, 12, 5, 1552, 63, 0.1);
    Case link = case_of(pair, batch);
    link.config.kernels = "cuda_link";
    link.config.dispatch_wire = Wire::e4m3_block128;
    if (pair.layout == Layout::grouped) link.config.alignment = 16;
    cases.push_back(link);
    link.duplicates = true;
    link.config.weights = Weights::caller;
    cases.push_back(link);
    link.config.overflow = Overflow::drop;
    link.config.receive_rows = pair.layout == Layout::grouped ? 150 : 0;
    link.config.rows_per_slot = pair.layout == Layout::slots ? 21 : 0;
    cases.push_back(link);
    for (int rank = 1; rank < ranks; ++rank) {
      batch.token_begin[static_cast<std::size_t>(rank)] = batch.tokens() - 2 * (ranks - rank);
    }
    for (const bool fused : {false, true}) {
      Case uneven = case_of(pair, batch);
      uneven.config.kernels = "cuda_link";
      uneven.fused = fused;
      cases.push_back(uneven);
    }
  }
  // Opaque rows.
  Case raw = case_of(kPairs[0], make_batch(13 * ranks, ranks, 8, 2, 77, 51), DType::raw);
  cases.push_back(raw);
  return cases;
}

class Conformance : public ::testing::TestWithParam<int> {};

TEST_P(Conformance, OfProcesses) {
  EXPECT_NO_THROW(on_processes(GetParam(), [&](Group& group, int gpu, cudaStream_t stream) {
    for (const Case& test : cases_of(group.size())) run_twin(group, gpu, stream, test);
  }));
}

TEST_P(Conformance, OfThreads) {
  EXPECT_NO_THROW(on_threads(GetParam(), [&](Group& group, int gpu, cudaStream_t stream) {
    for (const Case& test : cases_of(group.size())) run_twin(group, gpu, stream, test);
  }));
}

INSTANTIATE_TEST_SUITE_P(Ranks, Conformance, ::testing::Values(1, 2, 3, 4, 8));

// For compute-sanitizer: every kernel once, in little time.
TEST(Sanitized, EveryPairOnTwoRanks) {
  EXPECT_NO_THROW(on_threads(2, [&](Group& group, int gpu, cudaStream_t stream) {
    const Batch batch = make_batch(9, 2, 5, 3, 136, 52, 0.1);
    for (const Pair& pair : kPairs) {
      Case test = case_of(pair, batch);
      test.steps = 2;
      test.duplicates = true;
      test.own_results = pair.sum_at == SumAt::expert;
      test.fused = pair.layout == Layout::slots;
      run_twin(group, gpu, stream, test);
      test.config.kernels = "cuda_link";
      run_twin(group, gpu, stream, test);
    }
    Case quantised = case_of(kPairs[4], make_batch(9, 2, 5, 3, 272, 53));
    quantised.config.dispatch_wire = Wire::e4m3_block128;
    run_twin(group, gpu, stream, quantised);
    quantised.fused = true;
    run_twin(group, gpu, stream, quantised);
    Case filled = case_of(kPairs[6], make_batch(100, 2, 5, 3, 272, 62));
    filled.config.dispatch_wire = Wire::e4m3_block128;
    filled.config.kernels = "cuda_link";
    run_twin(group, gpu, stream, filled);
    filled.fused = true;
    run_twin(group, gpu, stream, filled);
    Case over_link = case_of(kPairs[0], make_batch(40, 2, 5, 3, 2320, 54));
    over_link.config.dispatch_wire = Wire::e4m3_block128;
    over_link.config.kernels = "cuda_link";
    over_link.config.num_sms = 1;
    run_twin(group, gpu, stream, over_link);
    run_twin(group, gpu, stream, case_of(kPairs[0], make_batch(600, 2, 9, 4, 16, 54)));
  }));
}

}  // namespace
}  // namespace wherry::test
