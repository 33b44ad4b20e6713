// Exchanges that share a window on a GPU take turns: call by call, and as graphs that are replayed in any
// order.
#include <gtest/gtest.h>

#include <fmt/format.h>

#include <random>

#include "gpu/captured.hpp"

namespace wherry::test {
namespace {

// A large exchange and a small one with slots.
struct Kinds {
  Layout large = Layout::tokens;
  Reduction small = Reduction::by_token;
  const char* kernels = "";
};
constexpr Kinds kPulled{};
constexpr Kinds kPushed{Layout::grouped, Reduction::by_rank, "cuda_link"};

std::vector<Case> two_cases(int ranks, const Kinds& kinds) {
  const Batch prefill = make_batch(40 * ranks, ranks, 12, 3, 256, 65, 0.1);
  const Batch decode = make_batch(4 * ranks, ranks, 12, 3, 256, 66, 0.1);
  Case large{config_of(prefill, kinds.large, Reduction::by_rank), prefill};
  Case small{config_of(decode, Layout::slots, kinds.small), decode};
  large.config.kernels = small.config.kernels = kinds.kernels;
  small.config.depth = 2;
  small.fused = true;
  return {large, small};
}

class Sharing {
 public:
  Sharing(Group& group, int gpu, cudaStream_t stream, const Kinds& kinds)
      : group_(group),
        cases_(two_cases(group.size(), kinds)) {
    const std::vector<ExchangeConfig> configs{cases_[0].config, cases_[1].config};
    std::vector<Exchange> exchanges = make_sharing_exchanges(group, Device::cuda(gpu), configs);
    const std::uint64_t apart =
        configs[0].window_bytes(group.size()) + configs[1].window_bytes(group.size());
    if (exchanges[0].window_bytes() >= apart) throw std::runtime_error("they do not share");
    for (std::size_t i = 0; i < 2; ++i) {
      ExchangeConfig on_cpu = cases_[i].config;
      on_cpu.kernels.clear();
      cpu_.emplace_back(group, on_cpu);
      cpu_plan_.push_back(cpu_[i].make_plan());
      gpu_.push_back(
          std::make_unique<CapturedSteps>(group, std::move(exchanges[i]), stream, cases_[i]));
    }
  }

  // `depth` steps of exchange `which`, with inputs that no other step has.
  void steps(std::size_t which, int number, bool replayed) {
    CapturedSteps& gpu = *gpu_[which];
    gpu.load(number);
    replayed ? gpu.replay() : gpu.issue();
    gpu.wait();
    for (int i = 0; i < cases_[which].config.depth; ++i) {
      const StepInput input = input_of(cases_[which], group_.rank(), number + i);
      const auto expected = cpu_sums(cpu_[which], cpu_plan_[which], input);
      if (gpu.sums(static_cast<std::size_t>(i), expected.size()) == expected) continue;
      throw std::runtime_error(fmt::format("rank {}: step {} of exchange {}, {}, is wrong",
                                           group_.rank(), number + i, which,
                                           replayed ? "replayed" : "issued"));
    }
  }
  [[nodiscard]] CapturedSteps& gpu(std::size_t which) { return *gpu_[which]; }

 private:
  Group& group_;
  std::vector<Case> cases_;
  std::vector<Exchange> cpu_;
  std::vector<Plan> cpu_plan_;
  std::vector<std::unique_ptr<CapturedSteps>> gpu_;
};

// Call by call.
void take_turns(Sharing& both, std::mt19937& random, int& number) {
  for (int round = 0; round < 60; ++round) both.steps(random() % 2, number += 2, false);
}

void take_turns_with_graphs(Group& group, int gpu, cudaStream_t stream, const Kinds& kinds) {
  Sharing both(group, gpu, stream, kinds);
  std::mt19937 random(5);  // the same on every rank
  int number = 0;
  take_turns(both, random, number);
  both.gpu(0).capture();
  both.gpu(1).capture();
  for (int round = 0; round < 120; ++round) {
    both.steps(random() % 2, number += 2, random() % 3 != 0);
  }
  both.gpu(0).destroy();
  both.gpu(1).destroy();
}

TEST(Sharing, ExchangesTakeTurnsAsProcesses) {
  for (const Kinds& kinds : {kPulled, kPushed}) {
    EXPECT_NO_THROW(on_processes(4, [&](Group& group, int gpu, cudaStream_t stream) {
      take_turns_with_graphs(group, gpu, stream, kinds);
    }));
  }
}

// Threads share a stream, which each of them cannot capture.
TEST(Sharing, ExchangesTakeTurnsAsThreads) {
  for (const Kinds& kinds : {kPulled, kPushed}) {
    EXPECT_NO_THROW(on_threads(3, [&](Group& group, int gpu, cudaStream_t stream) {
      Sharing both(group, gpu, stream, kinds);
      std::mt19937 random(5);
      int number = 0;
      take_turns(both, random, number);
    }));
  }
}

TEST(Sharing, ADispatchLeftUncombinedIsLostWhenTheWindowIsHandedOver) {
  EXPECT_NO_THROW(on_threads(2, [](Group& group, int gpu, cudaStream_t stream) {
    Sharing both(group, gpu, stream, kPulled);
    Exchange& large = both.gpu(0).exchange();
    both.steps(0, 0, false);
    Plan plan = large.make_plan();
    const StepInput input = input_of(two_cases(group.size(), kPulled)[0], group.rank(), 3);
    Buffer ids(input.ids.size() * sizeof(std::int32_t));
    Buffer x(input.x.size());
    ids.upload(input.ids.data(), input.ids.size() * sizeof(std::int32_t));
    x.upload(input.x.data(), input.x.size());
    const ExchangeConfig& c = large.config();
    large.plan({ids.as<std::int32_t>(), nullptr, input.tokens, c.topk}, plan);
    static_cast<void>(large.dispatch(plan, {x.get(), c.dtype, input.tokens, c.hidden}));
    both.steps(1, 4, false);
    try {
      static_cast<void>(large.combine_input(plan));
      throw std::runtime_error("rows that were overwritten could be combined");
    } catch (const Error& error) {
      if (error.code() != ErrorCode::misuse) throw;
    }
    both.steps(0, 6, false);
    both.steps(1, 8, false);
  }));
}

}  // namespace
}  // namespace wherry::test
