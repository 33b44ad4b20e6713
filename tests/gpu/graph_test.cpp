// Whole steps captured in a graph and replayed with other routings, rows and weights.
#include <gtest/gtest.h>

#include <fmt/format.h>

#include "gpu/captured.hpp"

namespace wherry::test {
namespace {

constexpr int kReplays = 8;

void replay_with_other_routings(Group& group, int gpu, cudaStream_t stream, const Case& test) {
  ExchangeConfig on_cpu = test.config;
  on_cpu.kernels.clear();
  Exchange cpu(group, on_cpu);
  Plan cpu_plan = cpu.make_plan();
  CapturedSteps steps(group, Exchange(group, Device::cuda(gpu), test.config), stream, test);
  const auto compare = [&](int first, const char* how) {
    for (int i = 0; i < test.config.depth; ++i) {
      const StepInput input = input_of(test, group.rank(), first + i);
      const auto expected = cpu_sums(cpu, cpu_plan, input);
      const auto at = static_cast<std::size_t>(i);
      if (steps.sums(at, expected.size()) != expected) {
        throw std::runtime_error(fmt::format("{}: rank {}: the sums of step {} {} are wrong",
                                             test.name(), group.rank(), first + i, how));
      }
      if (steps.plan(at).row != cpu_plan.to_host().row) {
        throw std::runtime_error(
            fmt::format("{}: the plan of step {} {} is wrong", test.name(), first + i, how));
      }
    }
  };
  steps.load(0);
  steps.issue();
  steps.wait();
  compare(0, "issued one by one");
  steps.capture();
  for (int round = 1; round <= kReplays; ++round) {
    const int first = round * test.config.depth;
    steps.load(first);
    steps.replay();
    steps.replay();  // nothing is cleared in between
    steps.wait();
    compare(first, "replayed");
  }
  group.barrier();
  steps.destroy();
}

TEST(Graphs, AreReplayedWithOtherRoutings) {
  EXPECT_NO_THROW(on_processes(4, [](Group& group, int gpu, cudaStream_t stream) {
    int number = 0;
    for (const Layout layout : {Layout::grouped, Layout::tokens, Layout::slots}) {
      for (const int depth : {1, 2, 3}) {
        const Batch batch = make_batch(90, 4, 11, 4, 128, 71, 0.1);
        Case test{config_of(batch, layout,
                            layout == Layout::slots ? Reduction::by_token : Reduction::by_rank),
                  batch};
        test.config.depth = depth;
        test.fused = number++ % 2 == 1;
        if (layout == Layout::grouped) {
          test.config.alignment = 4;
          if (depth == 2) test.config.sum_at = SumAt::expert;
        }
        replay_with_other_routings(group, gpu, stream, test);
      }
    }
    // As over a link, with so many tokens that rows are filled on arrival.
    for (const bool fused : {false, true}) {
      const Batch batch = make_batch(360, 4, 11, 4, 128, 72, 0.1);
      Case test{config_of(batch, Layout::slots, Reduction::by_rank), batch};
      test.config.kernels = "cuda_link";
      test.config.sum_at = SumAt::expert;
      test.fused = fused;
      replay_with_other_routings(group, gpu, stream, test);
    }
  }));
}

}  // namespace
}  // namespace wherry::test
