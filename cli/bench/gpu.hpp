// wherry bench --device cuda: ranks on GPUs, timed in captured graphs. How: bench/cuda/time_shape.hpp.
#pragma once

#include <cstdint>
#include <vector>

#include "launch.hpp"
#include "measure.hpp"
#include "report/output.hpp"
#include "wherry/exchange.hpp"

namespace wherry::cli {

struct GpuJob {
  LaunchOptions launch;
  ExchangeConfig config;  // complete; what GPUs are not measured with has been refused
  int replays = 30;
};

// Plain data, so that it can lie in memory that ranks share with their launcher.
struct GpuReport {
  bench::Spread dispatch, plan_dispatch, combine, step, total;  // microseconds of the slowest rank
  double floor_us = 0;  // of a total: the fewest bytes at copy_gbps
  double copy_gbps =
      0;  // of a large copy on the GPU; several GPUs: over the link, by a kernel, both ways
  std::int64_t bytes = 0;  // these fewest bytes, of all ranks; several GPUs: over the link, of each
  std::uint64_t window_bytes = 0;
  bool several_gpus = false;
  char kernels[32] = {}, fabric[32] = {};
};

struct GpuMeasurement {
  GpuJob job;
  GpuReport report;
};

// Throws unsupported where this build has no CUDA or the machine no GPU, and what the exchange throws.
[[nodiscard]] GpuReport measure_on_gpus(const GpuJob& job);
[[nodiscard]] Json gpu_bench_json(const GpuMeasurement& measurement);
void print_gpu_bench(const GpuMeasurement& measurement);
// One row each; they differ in their tokens.
void print_gpu_bench_sweep(const std::vector<GpuMeasurement>& measurements);

}  // namespace wherry::cli
