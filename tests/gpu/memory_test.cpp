// What an exchange takes of a GPU's memory: its window, and beside it what docs/design.md states.
#include <gtest/gtest.h>

#include <fmt/format.h>

#include <iostream>

#include "exchange/config.hpp"
#include "gpu/memory.hpp"
#include "support/layer.hpp"

namespace wherry::test {
namespace {

constexpr std::int64_t kMiB = 1 << 20;
constexpr std::int64_t kBeside = 4 * kMiB;  // of a rank: state, placement, workspace, rounding

std::int64_t free_bytes() {
  std::size_t available = 0;
  std::size_t total = 0;
  GPU_OK(cudaDeviceSynchronize());
  GPU_OK(cudaMemGetInfo(&available, &total));
  return static_cast<std::int64_t>(available);
}

// Lists that only `tokens` has: a choice for each (token row, k), and rows to gather.
std::int64_t list_bytes(const ExchangeConfig& config, int ranks) {
  if (config.layout != Layout::tokens) return 0;
  const layout::WindowParams& p = capacity_of(config, placement_of(config, ranks)).params;
  return config.depth *
         static_cast<std::int64_t>(p.token_row_capacity * p.topk * sizeof(Received::TokenChoice) +
                                   p.scalar_capacity * sizeof(std::int32_t));
}

// Both ranks on one GPU, so that it shows what both take.
TEST(Memory, OfTheDeviceIsTheWindowAndAStatedRest) {
  constexpr int kRanks = 2;
  for (const Layout layout : {Layout::grouped, Layout::tokens, Layout::slots}) {
    ExchangeConfig config{.experts = 64,
                          .topk = 8,
                          .hidden = 7168,
                          .max_tokens = 512,
                          .layout = layout,
                          .depth = 2,
                          .num_sms = 8};
    if (layout == Layout::slots) config.rows_per_slot = 64;
    std::int64_t taken = 0;
    run_threads(kRanks, [&](Group& group) {
      GPU_OK(cudaSetDevice(0));
      // The first one also loads kernels, which stay.
      {
        const Exchange warm(group, Device::cuda(0), config);
      }
      group.barrier();
      const std::int64_t before = free_bytes();
      group.barrier();
      const Exchange exchange(group, Device::cuda(0), config);
      group.barrier();
      if (group.rank() == 0) taken = before - free_bytes();
      group.barrier();
    });
    const auto window = static_cast<std::int64_t>(config.window_bytes(kRanks));
    const std::int64_t lists = list_bytes(config, kRanks);
    std::cout << fmt::format("{}: {:.1f} MiB taken by two ranks; windows {:.1f}, lists {:.1f}\n",
                             name(layout), static_cast<double>(taken) / kMiB,
                             2.0 * static_cast<double>(window) / kMiB,
                             2.0 * static_cast<double>(lists) / kMiB);
    EXPECT_GE(taken, kRanks * window) << name(layout);
    EXPECT_LE(taken, kRanks * (window + lists + kBeside)) << name(layout);
  }
}

}  // namespace
}  // namespace wherry::test
