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

// What is there to measure on, and what several GPUs are measured against.
struct GpuMachine {
  int gpus = 0;
  double link_gbps = 0;  // of a copy over the link by a kernel, both ways at once; one GPU: 0
};

// Plain data, so that it can lie in memory that ranks share with their launcher.
struct GpuReport {
  // Microseconds of the slowest rank, each replay the mean of its steps.
  bench::Spread dispatch, plan_dispatch, combine, step, total;
  double floor_us = 0;  // of a total: the fewest bytes at copy_gbps
  double copy_gbps =
      0;  // of a large copy on the GPU; several GPUs: over the link, by a kernel, both ways
  std::int64_t bytes = 0;  // these fewest bytes, of all ranks; several GPUs: over the link, of each
  std::uint64_t window_bytes = 0;
  bool several_gpus = false;
  int num_sms = 0;  // of each rank
  int steps_per_replay = 0;
  char kernels[32] = {}, fabric[32] = {};
};

struct GpuMeasurement {
  GpuJob job;
  GpuReport report;
};

// Once, before anything is measured. Throws unsupported where this build has no CUDA or the machine no GPU, or
// several whose link cannot be measured; bad_argument where ranks as processes outnumber several GPUs.
[[nodiscard]] GpuMachine look_at_machine(const LaunchOptions& launch_options);
// Throws what the exchange throws.
[[nodiscard]] GpuReport measure_on_gpus(const GpuJob& job, const GpuMachine& machine);
[[nodiscard]] Json gpu_bench_json(const GpuMeasurement& measurement);
void print_gpu_bench(const GpuMeasurement& measurement);
// One row each; they differ in their tokens.
void print_gpu_bench_sweep(const std::vector<GpuMeasurement>& measurements);

}  // namespace wherry::cli
