// Experts on a GPU against the dense reference: every layout, sizes that no kernel likes, and a captured
// graph. Rows that belong to nobody hold NaN.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <numeric>
#include <vector>

#include "experts/reference.hpp"
#include "experts/synthetic.hpp"
#include "support/cuda.hpp"
#include "support/mirrored.hpp"
#include "wherry/wherry.hpp"

namespace wherry {
namespace {

#if WHERRY_HAS_GPU_EXPERTS

constexpr Device kDevice = Device::cuda(0);

struct Shape {
  DType dtype;
  std::int64_t hidden, expert_hidden;
};

class ExpertsOnGpu : public testing::TestWithParam<Shape> {
 protected:
  // What the synthetic expert of each row makes of it, and whether `got` is that.
  void expect_right(const std::vector<int>& expert_of_row, ConstTensorView x, ConstTensorView got) {
    const std::vector<float> ones(expert_of_row.size(), 1.0F);
    const Expected expected = dense_reference(
        synthetic_, x,
        {expert_of_row.data(), ones.data(), static_cast<std::int64_t>(expert_of_row.size()), 1});
    const Comparison seen = compare(synthetic_, expected, got);
    EXPECT_TRUE(seen.passed) << "error " << seen.max_error << ", allowed " << seen.tolerance
                             << ", row " << seen.worst_token << ", column " << seen.worst_column;
  }
  [[nodiscard]] TensorView view(std::byte* data, std::int64_t rows) const {
    TensorView view;
    view.data = data;
    view.dtype = GetParam().dtype;
    view.rows = rows;
    view.cols = GetParam().hidden;
    return view;
  }
  [[nodiscard]] MirroredMemory memory(std::int64_t rows) const {
    return MirroredMemory(kDevice,
                          static_cast<std::size_t>(rows * view(nullptr, rows).row_bytes()));
  }
  // The rows of `all` that `at` names, one behind the other.
  [[nodiscard]] std::vector<std::byte> rows_at(const TensorView& all,
                                               const std::vector<std::int64_t>& at) const {
    std::vector<std::byte> rows;
    for (const std::int64_t row : at) {
      const std::byte* from = all.row(row);
      rows.insert(rows.end(), from, from + all.row_bytes());
    }
    return rows;
  }

  const std::vector<int> experts_{5, 0, 9};  // of the local slots
  SyntheticExperts synthetic_{3, GetParam().hidden, GetParam().expert_hidden};
  GatedMlp mlp_{kDevice,
                {.hidden = GetParam().hidden,
                 .expert_hidden = GetParam().expert_hidden,
                 .dtype = GetParam().dtype},
                experts_,
                synthetic_.source()};
};

TEST_P(ExpertsOnGpu, SegmentsWithGapsAndEmptySlots) {
  for (const std::vector<std::int64_t>& counts :
       {std::vector<std::int64_t>{7, 0, 130}, {1, 1, 1}, {0, 0, 0}, {0, 65, 0}}) {
    const std::vector<std::int64_t> begin{2, 12, 80, 230};
    MirroredMemory x = memory(230);
    MirroredMemory y = memory(230);
    std::memset(x.host(), 0xFF, x.bytes());
    std::memset(y.host(), 0xAB, y.bytes());
    const TensorView rows = view(x.host(), 230);
    std::vector<std::int64_t> used;
    std::vector<int> expert_of_row;
    for (std::size_t slot = 0; slot < 3; ++slot) {
      for (std::int64_t i = 0; i < counts[slot]; ++i) {
        used.push_back(begin[slot] + i);
        expert_of_row.push_back(experts_[slot]);
        fill_synthetic_tokens(1, used.back(), view(rows.row(used.back()), 1));
      }
    }
    x.upload();
    y.upload();
    mlp_.forward(view(x.device(), 230), begin, counts, view(y.device(), 230));
    synchronize(kDevice);
    y.download();
    std::vector<std::byte> in = rows_at(rows, used);
    std::vector<std::byte> out = rows_at(view(y.host(), 230), used);
    const auto n = static_cast<std::int64_t>(used.size());
    expect_right(expert_of_row, view(in.data(), n), view(out.data(), n));
    // Rows of nobody stay as they are.
    for (std::int64_t row = 0; row < 230; ++row) {
      if (std::ranges::find(used, row) != used.end()) continue;
      ASSERT_EQ(*view(y.host(), 230).row(row), std::byte{0xAB}) << row;
    }
  }
}

TEST_P(ExpertsOnGpu, SlotsWithCountsAndWithoutInACapturedGraph) {
  constexpr std::int64_t kRowsPerSlot = 24;
  const std::vector<std::int64_t> counts{24, 3, 0};
  MirroredMemory x = memory(3 * kRowsPerSlot);
  MirroredMemory y = memory(3 * kRowsPerSlot);
  std::memset(x.host(), 0xFF, x.bytes());
  const TensorView rows = view(x.host(), 3 * kRowsPerSlot);
  std::vector<std::int64_t> used;
  std::vector<int> expert_of_row;
  for (std::size_t slot = 0; slot < 3; ++slot) {
    for (std::int64_t i = 0; i < counts[slot]; ++i) {
      used.push_back(static_cast<std::int64_t>(slot) * kRowsPerSlot + i);
      expert_of_row.push_back(experts_[slot]);
      fill_synthetic_tokens(1, used.back(), view(rows.row(used.back()), 1));
    }
  }
  x.upload();
  std::vector<std::byte> in = rows_at(rows, used);
  const auto n = static_cast<std::int64_t>(used.size());
  const auto check = [&] {
    y.download();
    std::vector<std::byte> out = rows_at(view(y.host(), 3 * kRowsPerSlot), used);
    expect_right(expert_of_row, view(in.data(), n), view(out.data(), n));
    std::memset(y.host(), 0, y.bytes());
    y.upload();
  };
  const TensorView from = view(x.device(), 3 * kRowsPerSlot);
  const TensorView to = view(y.device(), 3 * kRowsPerSlot);
  mlp_.forward_slots(from, counts, to);
  check();
  mlp_.forward_slots(from, {}, to);
  check();

  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  mlp_.set_stream(stream);
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  mlp_.forward_slots(from, {}, to);
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
  for (int replay = 0; replay < 2; ++replay) {
    ASSERT_EQ(cudaGraphLaunch(exec, stream), cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    check();
  }
  mlp_.set_stream(nullptr);
  EXPECT_EQ(cudaGraphExecDestroy(exec), cudaSuccess);
  EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
  EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
}

// Layout `tokens`, through an exchange of one rank, which makes the lists.
TEST_P(ExpertsOnGpu, GatheredRowsAndTheSumOfTheirChoices) {
  constexpr std::int64_t kTokens = 40;
  constexpr int kTopk = 2;
  run_threads(1, [&](Group& group) {
    Exchange exchange(group, kDevice,
                      {.experts = 3,
                       .topk = kTopk,
                       .hidden = GetParam().hidden,
                       .max_tokens = kTokens,
                       .dtype = GetParam().dtype,
                       .layout = Layout::tokens});
    Plan plan = exchange.make_plan();
    std::vector<std::int32_t> ids;
    std::vector<float> weights;
    std::vector<int> experts;  // of the synthetic ones
    for (int choice = 0; choice < kTokens * kTopk; ++choice) {
      ids.push_back(choice % 7 == 3 ? -1 : (choice * 5 / 2) % 3);
      weights.push_back(0.25F + static_cast<float>(choice % 5) / 8);
      experts.push_back(ids.back() < 0 ? -1 : experts_[static_cast<std::size_t>(ids.back())]);
    }
    MirroredMemory ids_memory(kDevice, ids.size() * 4);
    MirroredMemory weights_memory(kDevice, weights.size() * 4);
    std::memcpy(ids_memory.host(), ids.data(), ids_memory.bytes());
    std::memcpy(weights_memory.host(), weights.data(), weights_memory.bytes());
    ids_memory.upload();
    weights_memory.upload();
    MirroredMemory x = memory(kTokens);
    MirroredMemory y = memory(kTokens);
    fill_synthetic_tokens(1, 0, view(x.host(), kTokens));
    x.upload();
    exchange.plan({reinterpret_cast<const std::int32_t*>(ids_memory.device()),
                   reinterpret_cast<const float*>(weights_memory.device()), kTokens, kTopk},
                  plan);
    Received received = exchange.dispatch(plan, view(x.device(), kTokens));
    const PlanData& data = plan.to_host();
    received.slot_begin = data.slot_begin;
    received.slot_counts = data.slot_counts;
    received.rows.rows = data.token_rows_received;
    const TensorView results = exchange.combine_input(plan);
    mlp_.forward_gathered(received, results);
    exchange.combine(plan, results, view(y.device(), kTokens));
    synchronize(kDevice);
    y.download();
    const Expected expected = dense_reference(synthetic_, view(x.host(), kTokens),
                                              {experts.data(), weights.data(), kTokens, kTopk});
    const Comparison seen = compare(synthetic_, expected, view(y.host(), kTokens));
    EXPECT_TRUE(seen.passed) << "error " << seen.max_error << ", allowed " << seen.tolerance;
  });
}

INSTANTIATE_TEST_SUITE_P(Shapes, ExpertsOnGpu,
                         testing::Values(Shape{DType::bf16, 512, 256}, Shape{DType::bf16, 7168, 64},
                                         Shape{DType::bf16, 1025, 37}, Shape{DType::f32, 300, 100},
                                         Shape{DType::f32, 33, 5}),
                         [](const testing::TestParamInfo<Shape>& each) {
                           return std::string(name(each.param.dtype)) + "_" +
                                  std::to_string(each.param.hidden) + "_" +
                                  std::to_string(each.param.expert_hidden);
                         });

TEST(GpuExperts, SayWhatIsWrongWithACall) {
  const SyntheticExperts synthetic{1, 64, 32};
  const std::vector<int> experts{0};
  const auto make = [&](const ExpertsConfig& config) {
    return GatedMlp(kDevice, config, experts, synthetic.source());
  };
  const auto problem_of = [](const auto& call) -> std::string {
    try {
      call();
    } catch (const Error& error) {
      return error.what();
    }
    return "nothing was thrown";
  };
  using testing::HasSubstr;
  EXPECT_THAT(
      problem_of([&] { make({.hidden = 64, .expert_hidden = 32, .implementation = "onednn"}); }),
      HasSubstr("no implementation 'onednn'; there is cublas"));
  EXPECT_THAT(problem_of([&] { make({.hidden = 64, .expert_hidden = 32, .dtype = DType::f64}); }),
              HasSubstr("experts compute in bf16 or f32, not in f64"));
  GatedMlp mlp = make({.hidden = 64, .expert_hidden = 32});
  EXPECT_EQ(mlp.device(), kDevice);
  EXPECT_EQ(mlp.implementation().name, "cublas");
  EXPECT_THAT(mlp.implementation().reason, HasSubstr("cuBLAS 1"));
  TensorView rows;
  rows.rows = 4;
  rows.cols = 64;
  EXPECT_THAT(problem_of([&] { mlp.forward_slots(rows, {}, rows); }),
              HasSubstr("rows has 4 rows and no data"));
}

#endif

}  // namespace
}  // namespace wherry
