// Rows that travel in another format than they have, and rows of f64: CPU and GPU agree to the bit over
// formats, dtypes, scale layouts, layouts of rows and odd sizes, with NaN, infinities, zeros, subnormals
// and the largest values among the data.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "gpu/twin.hpp"

namespace wherry::test {
namespace {

struct Kind {
  Layout layout;
  Reduction reduction;
};
constexpr Kind kKinds[] = {
    {Layout::grouped, Reduction::by_token}, {Layout::grouped, Reduction::by_rank},
    {Layout::tokens, Reduction::by_rank},   {Layout::slots, Reduction::by_token},
    {Layout::slots, Reduction::by_rank},
};
constexpr DType kDtypes[] = {DType::bf16, DType::f16, DType::f32, DType::f64};
// Short blocks, short pieces, several pieces, odd everything.
constexpr std::int64_t kSizes[] = {1, 24, 37, 128, 257, 544, 1000, 1040, 2051};

bool is_legal(Wire wire, DType dtype, ScaleLayout layout) {
  try {
    return !wire_format(wire, dtype, 8, layout).keeps_dtype();
  } catch (const Error&) {
    return false;
  }
}

// Cases of all kinds and sizes in turns.
class Cases {
 public:
  explicit Cases(int ranks) : ranks_(ranks) {}

  Case next(DType dtype) {
    const Kind& kind = kKinds[number_ % std::size(kKinds)];
    const std::int64_t hidden = kSizes[number_ % std::size(kSizes)];
    Case test{{}, make_batch(13 * ranks_, ranks_, 8, 4, hidden, 900U + number_, 0.1)};
    test.config = config_of(test.batch, kind.layout, kind.reduction, dtype);
    test.steps = 2;
    test.halves = number_ % 4 == 1;
    test.fused = number_ % 7 == 3;
    test.skewed = number_ % 3 == 2 ? static_cast<int>(dtype_bytes(dtype)) : 0;
    test.own_results = test.skewed != 0;
    test.addend = number_ % 5 == 2;
    test.scalars = number_ % 11 == 5;
    test.duplicates = number_ % 2 == 1;
    test.config.depth = 1 + static_cast<int>(number_ % 2);
    if (number_ % 13 == 7) test.config.weights = Weights::caller;
    if (kind.layout == Layout::grouped) test.config.alignment = number_ % 2 == 0 ? 8 : 1;
    ++number_;
    return test;
  }

 private:
  int ranks_;
  unsigned number_ = 0;
};

// On the way out: as they are, back into the caller's memory, and converted by the caller.
std::vector<Case> cases_out(int ranks) {
  std::vector<Case> cases;
  Cases make(ranks);
  for (const Wire wire : all_wires()) {
    for (const DType dtype : kDtypes) {
      for (const ScaleLayout layout :
           {ScaleLayout::row_major, ScaleLayout::column_major, ScaleLayout::packed_ue8m0}) {
        if (!is_legal(wire, dtype, layout)) continue;
        if (!wire_format(wire, dtype, 8).quantised() && layout != ScaleLayout::row_major) continue;
        for (const int how : {0, 1, 2}) {
          Case test = make.next(dtype);
          test.config.dispatch_wire = wire;
          test.config.scale_layout = layout;
          test.own_rows = how == 1;
          test.converted = how == 2;
          if (test.skewed != 0 && !way_out(test.config).quantised())
            test.skewed = 8;  // any element
          cases.push_back(test);
        }
      }
    }
  }
  return cases;
}

// On the way home, and in both directions.
std::vector<Case> cases_home(int ranks) {
  std::vector<Case> cases;
  Cases make(ranks);
  for (const Wire wire : all_wires()) {
    for (const DType dtype : kDtypes) {
      if (!is_legal(wire, dtype, ScaleLayout::row_major)) continue;
      for (std::size_t kind = 0; kind < std::size(kKinds); ++kind) {
        Case test = make.next(dtype);
        test.config.combine_wire = wire;
        if (kind == 0) test.config.dispatch_wire = wire;
        cases.push_back(test);
      }
    }
  }
  return cases;
}

// f64, whose sums are fp64; who sums a rank's share.
std::vector<Case> cases_f64(int ranks) {
  std::vector<Case> cases;
  Cases make(ranks);
  for (std::size_t number = 0; number < 3 * std::size(kKinds); ++number) {
    Case test = make.next(DType::f64);
    const bool summed =
        test.config.reduction == Reduction::by_rank && test.config.layout != Layout::tokens;
    if (summed && number % 2 == 0) test.config.sum_at = SumAt::expert;
    test.own_rows = number % 3 == 1;
    cases.push_back(test);
  }
  return cases;
}

// Tokens enough for whole rows a warp, and so few that warps share one.
std::vector<Case> cases_of_sizes(int ranks) {
  std::vector<Case> cases;
  for (const Wire wire : {Wire::int8_token, Wire::nvfp4, Wire::mxfp8_e4m3, Wire::e5m2_block128}) {
    for (const std::int64_t tokens : {1, 5, 3000}) {
      const std::int64_t hidden = tokens > 1000 ? 720 : 7168;
      Case test{{}, make_batch(tokens * ranks, ranks, 16, 4, hidden, 70, 0.1)};
      test.config = config_of(test.batch, Layout::tokens, Reduction::by_rank);
      test.config.dispatch_wire = wire;
      test.config.combine_wire = wire;
      test.steps = 1;
      cases.push_back(test);
    }
  }
  return cases;
}

void run_all(Group& group, int gpu, cudaStream_t stream) {
  for (const auto& cases : {cases_out(group.size()), cases_home(group.size()),
                            cases_f64(group.size()), cases_of_sizes(group.size())}) {
    for (const Case& test : cases) run_twin(group, gpu, stream, test);
  }
}

class Formats : public ::testing::TestWithParam<int> {};

TEST_P(Formats, OfProcessesAreThoseOfTheCpu) { EXPECT_NO_THROW(on_processes(GetParam(), run_all)); }
TEST_P(Formats, OfThreadsAreThoseOfTheCpu) { EXPECT_NO_THROW(on_threads(GetParam(), run_all)); }

INSTANTIATE_TEST_SUITE_P(Ranks, Formats, ::testing::Values(1, 2, 4, 8));

// Ranks that launch together need not agree on who converts.
TEST(MixedFormats, SomeRanksBringRowsThatAreConvertedAlready) {
  EXPECT_NO_THROW(on_threads(3, [](Group& group, int gpu, cudaStream_t stream) {
    for (const Wire wire : {Wire::e4m3_block128, Wire::int8_token, Wire::f16}) {
      for (const std::int64_t hidden : {256, 77}) {
        Case test{{}, make_batch(40, 3, 7, 3, hidden, 33, 0.1)};
        test.config = config_of(test.batch, Layout::grouped, Reduction::by_token);
        test.config.dispatch_wire = wire;
        test.converted = group.rank() == 1;
        run_twin(group, gpu, stream, test);
      }
    }
  }));
}

// For compute-sanitizer: every kernel of formats once, in little time.
TEST(Sanitized, EveryKindOfFormatOnTwoRanks) {
  EXPECT_NO_THROW(on_threads(2, [](Group& group, int gpu, cudaStream_t stream) {
    Cases make(2);
    for (const Wire wire : {Wire::f16, Wire::e5m2_block128_pow2, Wire::nvfp4, Wire::int8_token}) {
      for (const int how : {0, 1, 2}) {
        Case test = make.next(DType::bf16);
        test.config.dispatch_wire = wire;
        test.config.combine_wire = wire;
        test.own_rows = how == 1;
        test.converted = how == 2;
        run_twin(group, gpu, stream, test);
      }
    }
    Case wide = make.next(DType::f64);
    run_twin(group, gpu, stream, wide);
    wide = make.next(DType::f64);
    wide.config.dispatch_wire = Wire::bf16;
    wide.config.combine_wire = Wire::f32;
    run_twin(group, gpu, stream, wide);
  }));
}

TEST(FormatErrors, AreThoseOfTheCpu) {
  EXPECT_NO_THROW(on_processes(1, [](Group& group, int gpu, cudaStream_t stream) {
    const Batch batch = make_batch(4, 1, 4, 2, 64, 5);
    ExchangeConfig config = config_of(batch, Layout::grouped, Reduction::by_token);
    config.combine_wire = Wire::int8_token;
    config.dispatch_wire = Wire::mxfp8_e4m3;
    Exchange exchange(group, Device::cuda(gpu), config);
    exchange.set_stream(stream);
    Plan plan = exchange.make_plan();
    const std::vector<std::int32_t> ids(8, 1);
    Buffer device_ids(ids.size() * sizeof(std::int32_t));
    device_ids.upload(ids.data(), ids.size() * sizeof(std::int32_t));
    exchange.plan({device_ids.as<std::int32_t>(), nullptr, 4, 2}, plan);
    const Buffer x(4 * 64 * 2);
    const Received received =
        exchange.dispatch(plan, {x.get(), DType::bf16, std::int64_t{4}, std::int64_t{64}});
    const auto code_of = [](const auto& call) {
      try {
        call();
      } catch (const Error& error) {
        return error.code();
      }
      throw std::runtime_error("nothing was thrown");
    };
    // No room for results as they are.
    if (code_of([&] { static_cast<void>(exchange.combine_input(plan)); }) !=
        ErrorCode::unsupported) {
      throw std::runtime_error("combine_input() with a combine_wire is not unsupported");
    }
    exchange.release(received);
    // Rows in the format, without their scales.
    const ConstTensorView converted{x.get(), DType::raw, std::int64_t{4}, std::int64_t{64}};
    if (code_of([&] { exchange.dispatch(plan, converted); }) != ErrorCode::bad_argument) {
      throw std::runtime_error("rows without their scales are not a bad argument");
    }
    GPU_OK(cudaStreamSynchronize(stream));
  }));
}

}  // namespace
}  // namespace wherry::test
