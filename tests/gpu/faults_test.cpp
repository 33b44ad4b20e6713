// What goes wrong on a GPU is the error that the CPU gives: the same code, stage, peer and, for what is
// found in the data, the same sentence, on every rank.
#include <gtest/gtest.h>

#include <fmt/format.h>
#include <signal.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <stdexcept>
#include <thread>

#include "gpu/on_gpu.hpp"
#include "gpu/twin.hpp"
#include "support/shared.hpp"

namespace wherry::test {
namespace {

constexpr int kRanks = 3;

[[noreturn]] void fail(const std::string& what) { throw std::runtime_error(what); }

template <typename Fn>
std::optional<Error> error_of(Fn fn) {
  try {
    fn();
  } catch (const Error& error) {
    return error;
  }
  return std::nullopt;
}

void expect(const std::optional<Error>& error, ErrorCode code, Stage stage, int peer) {
  if (!error.has_value()) fail(fmt::format("no error; {} was expected", name(code)));
  if (error->code() != code || error->stage() != stage || error->peer() != peer) {
    fail(fmt::format("{} at {} of {}, blaming {}, was expected: {}", name(code), name(stage),
                     error->rank(), peer, error->what()));
  }
}

Batch batch_of(int ranks) { return make_batch(12 * ranks, ranks, 6, 2, 64, 61); }

// What the CPU says of the same mistake, which it raises at once.
std::optional<Error> cpu_error(const Group& group, const ExchangeConfig& config,
                               const std::vector<std::int32_t>& ids, std::int64_t tokens) {
  ExchangeConfig cpu = config;
  cpu.kernels.clear();
  Exchange exchange(group, cpu);
  Plan plan = exchange.make_plan();
  return error_of([&] { exchange.plan({ids.data(), nullptr, tokens, config.topk}, plan); });
}

void compare(const std::optional<Error>& cpu, const std::optional<Error>& gpu) {
  if (!cpu.has_value()) fail("no error on the CPU");
  if (!gpu.has_value()) fail("no error on the GPU");
  expect(gpu, cpu->code(), cpu->stage(), cpu->peer());
  if (std::string(gpu->what()) != cpu->what()) {
    fail(fmt::format("on the CPU: {}; on the GPU: {}", cpu->what(), gpu->what()));
  }
}

TEST(Faults, ABadIdIsTheSameErrorOnEveryRankAndTheExchangeGoesOn) {
  EXPECT_NO_THROW(on_processes(kRanks, [](Group& group, int gpu, cudaStream_t stream) {
    const Batch batch = batch_of(kRanks);
    const ExchangeConfig config = config_of(batch, Layout::grouped, Reduction::by_token);
    const std::int64_t tokens = batch.tokens_of(group.rank());
    std::vector<std::int32_t> good(static_cast<std::size_t>(tokens * config.topk), 3);
    std::vector<std::int32_t> bad = good;
    if (group.rank() == 1) bad[5] = 77;
    const auto cpu = cpu_error(group, config, bad, tokens);
    OnGpu mine(group, gpu, stream, config);
    for (int round = 0; round < 2; ++round) {
      mine.make_plan(bad, tokens);
      mine.step(tokens);  // carries nothing
      compare(cpu, error_of([&] { static_cast<void>(mine.plan.to_host()); }));
      mine.exchange.check();  // said already
      mine.make_plan(bad, tokens);
      mine.step(tokens);
      GPU_OK(cudaStreamSynchronize(stream));
      compare(cpu, error_of([&] { mine.exchange.check(); }));
      mine.exchange.check();
      mine.make_plan(good, tokens);
      mine.step(tokens);
      if (mine.plan.to_host().tokens != tokens) fail("the good plan is not there");
    }
    group.barrier();
  }));
}

// Plan and dispatch in one launch of several blocks: those that count, and those that find it.
ExchangeConfig fused_config(const Batch& batch) {
  ExchangeConfig config = config_of(batch, Layout::slots, Reduction::by_rank);
  config.sum_at = SumAt::expert;
  config.kernels = "cuda_link";
  config.num_sms = 4;
  return config;
}

TEST(Faults, ABadIdInAPlanMadeWithItsDispatchIsTheSameErrorOnEveryRank) {
  EXPECT_NO_THROW(on_processes(kRanks, [](Group& group, int gpu, cudaStream_t stream) {
    const Batch batch = batch_of(kRanks);
    const ExchangeConfig config = fused_config(batch);
    const std::int64_t tokens = batch.tokens_of(group.rank());
    const std::vector<std::int32_t> good(static_cast<std::size_t>(tokens * config.topk), 3);
    OnGpu mine(group, gpu, stream, config);
    // In the first block's tokens, and in the last's.
    for (const std::size_t where : {std::size_t{1}, good.size() - 1}) {
      std::vector<std::int32_t> bad = good;
      if (group.rank() == 1) bad[where] = -2;
      const auto cpu = cpu_error(group, config, bad, tokens);
      mine.plan_dispatch(bad, tokens);
      mine.combine();  // carries nothing
      compare(cpu, error_of([&] { static_cast<void>(mine.plan.to_host()); }));
      mine.exchange.check();  // said already
      mine.plan_dispatch(good, tokens);
      mine.combine();
      if (mine.plan.to_host().tokens != tokens) fail("the good plan is not there");
    }
    const std::vector<std::int32_t> many(
        static_cast<std::size_t>((config.max_tokens + 1) * config.topk), 1);
    const std::int64_t brought = group.rank() == 2 ? config.max_tokens + 1 : tokens;
    const auto cpu = cpu_error(group, config, many, brought);
    mine.plan_dispatch(many, brought);
    compare(cpu, error_of([&] { static_cast<void>(mine.plan.to_host()); }));
    group.barrier();
  }));
}

TEST(Faults, TooManyTokensOnOneRankIsAnErrorOnAll) {
  EXPECT_NO_THROW(on_processes(kRanks, [](Group& group, int gpu, cudaStream_t stream) {
    const Batch batch = batch_of(kRanks);
    const ExchangeConfig config = config_of(batch, Layout::tokens, Reduction::by_rank);
    const std::int64_t tokens = group.rank() == 2 ? config.max_tokens + 1 : 4;
    const std::vector<std::int32_t> ids(static_cast<std::size_t>(tokens * config.topk), 1);
    const auto cpu = cpu_error(group, config, ids, tokens);
    OnGpu mine(group, gpu, stream, config);
    mine.make_plan(ids, tokens);
    compare(cpu, error_of([&] { static_cast<void>(mine.plan.to_host()); }));
    group.barrier();
  }));
}

TEST(Faults, MoreRowsThanThereIsRoomForIsTheSameErrorOnEveryRank) {
  EXPECT_NO_THROW(on_processes(kRanks, [](Group& group, int gpu, cudaStream_t stream) {
    const Batch batch = batch_of(kRanks);
    for (const Layout layout : {Layout::grouped, Layout::tokens, Layout::slots}) {
      ExchangeConfig config = config_of(
          batch, layout, layout == Layout::tokens ? Reduction::by_rank : Reduction::by_token);
      config.receive_rows = layout == Layout::slots ? 0 : 7;
      config.rows_per_slot = layout == Layout::slots ? 5 : 0;
      if (layout == Layout::grouped) config.alignment = 4;
      const std::vector<std::int32_t> ids(static_cast<std::size_t>(6 * config.topk), 2);
      const auto cpu = cpu_error(group, config, ids, 6);
      OnGpu mine(group, gpu, stream, config);
      mine.make_plan(ids, 6);
      compare(cpu, error_of([&] { static_cast<void>(mine.plan.to_host()); }));
      group.barrier();
    }
  }));
}

TEST(Faults, APlacementThatOneRankHasNotSwitchedToIsFound) {
  EXPECT_NO_THROW(on_processes(2, [](Group& group, int gpu, cudaStream_t stream) {
    const Batch batch = batch_of(2);
    const ExchangeConfig config = config_of(batch, Layout::grouped, Reduction::by_token);
    OnGpu mine(group, gpu, stream, config);
    const std::vector<std::int32_t> ids(static_cast<std::size_t>(4 * config.topk), 1);
    mine.make_plan(ids, 4);
    static_cast<void>(mine.plan.to_host());
    const auto other = Placement::from_slots(6, {5, 4, 3, 2, 1, 0}, {0, 3, 6});
    if (group.rank() == 0) mine.exchange.set_placement(other);
    mine.make_plan(ids, 4);
    expect(error_of([&] { static_cast<void>(mine.plan.to_host()); }), ErrorCode::config_mismatch,
           Stage::plan, 1 - group.rank());
    if (group.rank() == 1) mine.exchange.set_placement(other);
    mine.make_plan(ids, 4);
    static_cast<void>(mine.plan.to_host());
    if (mine.exchange.loads()[1] != 2 * 8) fail("the loads are wrong");
    group.barrier();
  }));
}

struct Absence {
  Stage stage;
  bool fused;  // the others plan and dispatch in one launch, and push what they have summed
};
class Missing : public ::testing::TestWithParam<Absence> {};

TEST_P(Missing, ARankThatDoesNotComeIsNamedByAllOthersInTime) {
  const auto [stage, fused] = GetParam();
  EXPECT_NO_THROW(on_processes(kRanks, [stage, fused](Group& group, int gpu, cudaStream_t stream) {
    constexpr int kLate = 1;
    const Batch batch = batch_of(kRanks);
    ExchangeConfig config =
        fused ? fused_config(batch) : config_of(batch, Layout::grouped, Reduction::by_rank);
    config.deadline = Seconds(1.0);
    OnGpu mine(group, gpu, stream, config);
    const std::vector<std::int32_t> ids(static_cast<std::size_t>(12 * config.topk), 1);
    mine.make_plan(ids, 12);
    mine.step(12);
    GPU_OK(cudaStreamSynchronize(stream));
    group.barrier();
    const bool late = group.rank() == kLate;
    const auto start = std::chrono::steady_clock::now();
    const bool plans = stage != Stage::plan || !late;
    const bool dispatches = !late || stage == Stage::combine_recv;
    if (fused && dispatches) {
      mine.plan_dispatch(ids, 12);
    } else {
      if (plans) mine.make_plan(ids, 12);
      if (stage != Stage::plan && dispatches) mine.exchange.dispatch(mine.plan, mine.rows(12));
    }
    if (stage == Stage::combine_recv && !late) mine.combine();
    if (late) std::this_thread::sleep_for(std::chrono::milliseconds(1500));
    GPU_OK(cudaStreamSynchronize(stream));
    // The late rank learns it from the others.
    if (late) mine.make_plan(ids, 12);
    GPU_OK(cudaStreamSynchronize(stream));
    expect(error_of([&] { mine.exchange.check(); }), ErrorCode::timeout, stage, kLate);
    expect(error_of([&] { mine.exchange.dispatch(mine.plan, mine.rows(12)); }), ErrorCode::timeout,
           stage, kLate);
    const double took =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (took > 3.0) fail(fmt::format("it took {} s", took));
    group.barrier();
  }));
}

INSTANTIATE_TEST_SUITE_P(
    Stages, Missing,
    ::testing::Values(Absence{Stage::plan, false}, Absence{Stage::dispatch_recv, false},
                      Absence{Stage::combine_recv, false}, Absence{Stage::plan, true},
                      Absence{Stage::dispatch_recv, true}, Absence{Stage::combine_recv, true}));

TEST(Faults, AKilledRankIsNamedAndTheOthersGoOnWithoutIt) {
  constexpr int kKilled = 1;
  struct Report {
    std::atomic<int> went_on;
    char problem[kRanks][400];
  };
  const Shared<Report> report;
  try {
    on_processes(kRanks, [&report](Group& group, int gpu, cudaStream_t stream) {
      const Batch batch = batch_of(kRanks);
      ExchangeConfig config = config_of(batch, Layout::grouped, Reduction::by_rank);
      config.deadline = Seconds(1.0);
      OnGpu mine(group, gpu, stream, config);
      const std::vector<std::int32_t> ids(static_cast<std::size_t>(12 * config.topk), 1);
      mine.make_plan(ids, 12);
      mine.step(12);
      GPU_OK(cudaStreamSynchronize(stream));
      group.barrier();
      if (group.rank() == kKilled) {
        std::this_thread::sleep_for(std::chrono::milliseconds(200));  // the others wait in a kernel
        raise(SIGKILL);
      }
      try {
        mine.make_plan(ids, 12);
        GPU_OK(cudaStreamSynchronize(stream));
        // The host, which knows that the rank has ended, says more than the kernel that waited for it.
        expect(error_of([&] { mine.exchange.check(); }), ErrorCode::peer_failed, Stage::plan,
               kKilled);
        constexpr int kRest[] = {0, 2};
        Group rest = group.subgroup(kRest);
        const Batch less = batch_of(2);
        run_twin(rest, gpu, stream, {config_of(less, Layout::tokens, Reduction::by_rank), less});
        ++report->went_on;
      } catch (const std::exception& error) {
        std::snprintf(report->problem[group.rank()], sizeof(report->problem[0]), "%s",
                      error.what());
      }
    });
    ADD_FAILURE() << "nobody missed the killed rank";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::peer_failed) << error.what();
    EXPECT_EQ(error.peer(), kKilled) << error.what();
  }
  EXPECT_EQ(report->went_on, kRanks - 1);
  for (const char* problem : report->problem) EXPECT_STREQ(problem, "");
}

TEST(Faults, ABadCallOfOneRankEndsTheWaitsOfAll) {
  EXPECT_NO_THROW(on_processes(kRanks, [](Group& group, int gpu, cudaStream_t stream) {
    const Batch batch = batch_of(kRanks);
    OnGpu mine(group, gpu, stream, config_of(batch, Layout::grouped, Reduction::by_token));
    const std::vector<std::int32_t> ids(8, 1);
    mine.make_plan(ids, 4);
    const auto error =
        error_of([&] { mine.exchange.dispatch(mine.plan, mine.rows(group.rank() == 2 ? 3 : 4)); });
    if (group.rank() == 2) expect(error, ErrorCode::bad_argument, Stage::dispatch_send, -1);
    GPU_OK(cudaStreamSynchronize(stream));
    expect(error_of([&] { mine.exchange.check(); }), ErrorCode::bad_argument, Stage::dispatch_send,
           2);
    group.barrier();
  }));
}

TEST(Faults, WhatCudaCannotDoIsUnsupportedOnEveryRank) {
  EXPECT_NO_THROW(on_processes(2, [](Group& group, int gpu, cudaStream_t) {
    const Batch batch = batch_of(2);
    const ExchangeConfig good = config_of(batch, Layout::grouped, Reduction::by_token);
    std::vector<ExchangeConfig> all(3, good);
    all[0].topk = 33;
    all[1].replicated = 2;
    all[2].num_sms = 5000;
    for (const ExchangeConfig& config : all) {
      expect(error_of([&] { const Exchange exchange(group, Device::cuda(gpu), config); }),
             ErrorCode::unsupported, Stage::startup, 0);
    }
    // Ranks that would send other rows than the others expect.
    ExchangeConfig other = good;
    if (group.rank() == 1) other.kernels = "cuda_link";
    expect(error_of([&] { const Exchange exchange(group, Device::cuda(gpu), other); }),
           ErrorCode::config_mismatch, Stage::startup, 1);
    expect(error_of([&] { const Exchange exchange(group, Device::cuda(99), good); }),
           ErrorCode::unsupported, Stage::startup, 0);
    expect(error_of([&] {
             const Exchange exchange(group, group.rank() == 0 ? Device::cpu() : Device::cuda(gpu),
                                     good);
           }),
           ErrorCode::config_mismatch, Stage::startup, 1);
  }));
}

TEST(Kernels, TheEnvironmentPinsThoseOfAGpu) {
  setenv("WHERRY_KERNELS", "cuda_copy", 1);
  EXPECT_NO_THROW(on_processes(2, [](Group& group, int gpu, cudaStream_t) {
    const Exchange exchange(group, Device::cuda(gpu),
                            config_of(batch_of(2), Layout::grouped, Reduction::by_token));
    if (exchange.kernels() != "cuda_copy") throw std::runtime_error("WHERRY_KERNELS was ignored");
  }));
  unsetenv("WHERRY_KERNELS");
}

TEST(Faults, MemoryOfTheHostIsRefused) {
  EXPECT_NO_THROW(on_processes(1, [](Group& group, int gpu, cudaStream_t stream) {
    const Batch batch = batch_of(1);
    OnGpu mine(group, gpu, stream, config_of(batch, Layout::grouped, Reduction::by_token));
    const std::vector<std::int32_t> ids(8, 1);
    expect(error_of([&] { mine.exchange.plan({ids.data(), nullptr, 4, 2}, mine.plan); }),
           ErrorCode::bad_argument, Stage::plan, -1);
    mine.make_plan(ids, 4);
    mine.step(4);
    GPU_OK(cudaStreamSynchronize(stream));
    mine.exchange.check();
  }));
}

}  // namespace
}  // namespace wherry::test
