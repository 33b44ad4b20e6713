// Many steps without a barrier between them, ranks delayed at random: every one bitwise right.
// WHERRY_SOAK_STEPS sets how many (10 000).
#include <gtest/gtest.h>

#include <fmt/format.h>

#include <cstdlib>
#include <optional>
#include <random>
#include <thread>

#include "gpu/twin.hpp"

namespace wherry::test {
namespace {

constexpr int kSets = 4;

int soak_steps() {
  const char* const text = std::getenv("WHERRY_SOAK_STEPS");
  return text != nullptr ? std::atoi(text) : 10'000;
}

TensorView tensor(void* data, const ExchangeConfig& c, std::int64_t rows) {
  TensorView view;
  view.data = data;
  view.dtype = c.dtype;
  view.rows = rows;
  view.cols = c.hidden;
  return view;
}

// Device copies of what a rank brings, and what it must get.
struct Set {
  Set(Exchange& cpu, const StepInput& input)
      : tokens(input.tokens),
        ids(input.ids.size() * sizeof(std::int32_t)),
        weights(input.weights.size() * sizeof(float)),
        x(input.x.size()),
        sums(input.x.size()),
        expected(input.x.size()) {
    const ExchangeConfig& c = cpu.config();
    Plan plan = cpu.make_plan();
    cpu.plan({input.ids.data(), input.weights.data(), tokens, c.topk}, plan);
    const Received rows = cpu.dispatch(plan, {input.x.data(), c.dtype, tokens, c.hidden});
    cpu.combine(plan, rows.rows, tensor(expected.data(), c, tokens));
    ids.upload(input.ids.data(), input.ids.size() * sizeof(std::int32_t));
    weights.upload(input.weights.data(), input.weights.size() * sizeof(float));
    x.upload(input.x.data(), input.x.size());
  }
  std::int64_t tokens;
  Buffer ids, weights, x, sums;
  std::vector<std::byte> expected;
};

void soak(Group& group, int gpu, cudaStream_t stream, const Case& test) {
  ExchangeConfig on_cpu = test.config;
  on_cpu.kernels.clear();
  Exchange cpu(group, on_cpu);
  Exchange exchange(group, Device::cuda(gpu), test.config);
  exchange.set_stream(stream);
  std::vector<std::unique_ptr<Set>> sets;
  sets.reserve(kSets);
  for (int i = 0; i < kSets; ++i) {
    sets.push_back(std::make_unique<Set>(cpu, input_of(test, group.rank(), i)));
  }
  std::vector<Plan> plans;
  plans.reserve(static_cast<std::size_t>(test.config.depth));
  for (int i = 0; i < test.config.depth; ++i) plans.push_back(exchange.make_plan());
  std::mt19937 random(static_cast<unsigned>(97 + group.rank()));
  const ExchangeConfig& c = exchange.config();
  std::vector<std::byte> got;
  const auto check = [&](const Set& set, int step) {
    got.resize(set.expected.size());
    GPU_OK(cudaMemcpyAsync(got.data(), set.sums.get(), got.size(), cudaMemcpyDeviceToHost, stream));
    GPU_OK(cudaStreamSynchronize(stream));
    exchange.check();
    if (got == set.expected) return;
    throw std::runtime_error(
        fmt::format("{}: rank {}: step {} is wrong", test.name(), group.rank(), step));
  };
  // With halves a combine ends behind the beginning of the next dispatch.
  struct Pending {
    Exchange::CombineHandle handle;
    const Set* set;
    int step;
  };
  std::optional<Pending> pending;
  const auto finish_pending = [&] {
    if (!pending.has_value()) return;
    pending->handle.finish();
    if (pending->step % 4 != 0) check(*pending->set, pending->step);
    pending.reset();
  };
  for (int step = 0; step < soak_steps(); ++step) {
    Set& set = *sets[static_cast<std::size_t>(step % kSets)];
    Plan& plan = plans[static_cast<std::size_t>(step % test.config.depth)];
    const auto dawdle = [&] {
      if (random() % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 200));
    };
    const Routing routing{set.ids.as<std::int32_t>(), set.weights.as<float>(), set.tokens, c.topk};
    const ConstTensorView x{set.x.get(), c.dtype, set.tokens, c.hidden};
    Received rows;
    dawdle();
    if (test.fused && !test.halves && step % 3 != 0) {
      rows = exchange.plan_dispatch(routing, plan, x);
    } else {
      exchange.plan(routing, plan);
      dawdle();
      auto begun = exchange.dispatch_begin(plan, x);
      dawdle();
      finish_pending();
      rows = begun.finish();
    }
    if (step % 7 == 5) {  // a dispatch that no combine follows
      exchange.release(rows);
      continue;
    }
    const TensorView y = exchange.combine_input(plan);
    GPU_OK(cudaMemcpyAsync(y.data, rows.rows.data, static_cast<std::size_t>(y.rows * y.pitch()),
                           cudaMemcpyDeviceToDevice, stream));
    dawdle();
    const TensorView sums = tensor(set.sums.get(), c, set.tokens);
    if (test.halves) {
      pending = {exchange.combine_begin(plan, y, sums), &set, step};
      continue;
    }
    exchange.combine(plan, y, sums);
    if (step % 4 != 0) check(set, step);  // else goes on without waiting
  }
  finish_pending();
  GPU_OK(cudaStreamSynchronize(stream));
  exchange.check();
  group.barrier();
}

class Soak : public ::testing::TestWithParam<int> {};

TEST_P(Soak, StepsUnderRandomDelaysAreBitwiseRight) {
  const int kind = GetParam();
  EXPECT_NO_THROW(on_processes(kind == 3 ? 8 : 4, [kind](Group& group, int gpu,
                                                         cudaStream_t stream) {
    // Kind 5: enough tokens for rows that are filled on arrival.
    const Batch batch =
        make_batch(group.size() * (kind == 5 ? 90 : 6), group.size(), 9, 3, 64, 81, 0.1);
    const Layout layouts[] = {Layout::grouped, Layout::tokens, Layout::slots,
                              Layout::slots,   Layout::slots,  Layout::slots};
    const Layout layout = layouts[kind];
    const bool by_token = layout == Layout::slots && kind < 4;
    Case test{config_of(batch, layout, by_token ? Reduction::by_token : Reduction::by_rank), batch};
    test.config.depth = 1 + kind % 3;
    test.config.num_sms = 4;
    test.fused = layout == Layout::slots;
    if (kind == 0) test.config.sum_at = SumAt::expert;
    if (kind >= 4) test.config.kernels = "cuda_link";
    test.halves = kind == 4;
    soak(group, gpu, stream, test);
  }));
}

INSTANTIATE_TEST_SUITE_P(Kinds, Soak, ::testing::Values(0, 1, 2, 3, 4, 5));

}  // namespace
}  // namespace wherry::test
