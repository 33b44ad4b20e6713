#include "bench/gpu.hpp"

#include <fmt/format.h>

#include <cstdio>
#include <functional>
#include <optional>
#include <string>
#include <utility>

#include "bench/print.hpp"
#include "gather.hpp"
#include "progress.hpp"
#include "report/table.hpp"
#include "support/check.hpp"
#include "support/devices.hpp"

#if WHERRY_HAS_CUDA
#include "cuda/link.hpp"
#include "cuda/time_shape.hpp"
#endif

namespace wherry::cli {

namespace {

const char* ranks_are(const GpuJob& job) { return job.launch.threads ? "threads" : "processes"; }

double floor_fraction(const GpuReport& report) {
  return report.total.p50 > 0 ? report.floor_us / report.total.p50 : 0.0;
}

Stages stages(const GpuReport& r) {
  return {{"dispatch", r.dispatch},
          {"plan_dispatch", r.plan_dispatch},
          {"combine", r.combine},
          {"step", r.step},
          {"total", r.total}};
}

std::string head_text(const GpuMeasurement& m, const char* tokens) {
  const ExchangeConfig& c = m.job.config;
  return fmt::format(
      "Plan, dispatch and combine on {} over {} rank {} {} {} tokens each\n"
      "  {} experts, {} a token, hidden {}, {} to the experts\n"
      "  layout {}, reduction {}, depth {}; {} multiprocessors each\n"
      "  kernels {}, fabric {}, windows of {}\n",
      m.report.several_gpus ? "several GPUs" : "one GPU", m.job.launch.ranks, ranks_are(m.job),
      tokens, c.max_tokens, c.experts, c.topk, c.hidden,
      c.dispatch_wire == Wire::same ? name(c.dtype) : name(c.dispatch_wire), name(c.layout),
      name(c.effective_reduction()), c.depth, m.report.num_sms, m.report.kernels, m.report.fabric,
      bytes_text(static_cast<double>(m.report.window_bytes)));
}

#if WHERRY_HAS_CUDA

struct Look {
  GpuMachine machine;
  bool link = true;  // can be measured
  char problem[256] = {};
};

bench::GpuShape shape_of(const GpuJob& job) {
  const ExchangeConfig& c = job.config;
  bench::GpuShape shape;
  shape.ranks = job.launch.ranks;
  shape.tokens = static_cast<int>(c.max_tokens);
  shape.hidden = static_cast<int>(c.hidden);
  shape.topk = c.topk;
  shape.experts = c.experts;
  shape.layout = c.layout;
  shape.reduction = c.effective_reduction();
  shape.sum_at = std::nullopt;
  shape.depth = c.depth;
  shape.e4m3 = c.dispatch_wire == Wire::e4m3_block128;
  shape.kernels = c.kernels.c_str();
  shape.num_sms = c.num_sms;
  shape.deadline = c.deadline.count();
  return shape;
}

void put_stages(const bench::ShapeTimes& times, GpuReport& report) {
  for (const bench::StageTime& stage : times.stages) {
    const std::string name = stage.stage;
    const bench::Spread spread =
        bench::spread_of(std::vector<double>(stage.us.begin(), stage.us.end()));
    if (name == "dispatch") report.dispatch = spread;
    if (name == "plan_dispatch") report.plan_dispatch = spread;
    if (name == "combine") report.combine = spread;
    if (name == "step") report.step = spread;
    if (name != "planned_step") continue;
    report.total = spread;
    report.bytes = static_cast<std::int64_t>(stage.bytes);
    report.floor_us = stage.bytes / times.gbps / 1e3;
  }
  report.copy_gbps = times.gbps;
  report.window_bytes = times.window_bytes;
  report.num_sms = times.num_sms;
  report.steps_per_replay = times.steps;
  std::snprintf(report.kernels, sizeof(report.kernels), "%s", times.kernels.c_str());
  std::snprintf(report.fabric, sizeof(report.fabric), "%s", times.fabric.c_str());
}

#endif  // WHERRY_HAS_CUDA

}  // namespace

GpuMachine look_at_machine(const LaunchOptions& launch_options) {
  const Error::Where where{Stage::startup, -1, -1};
#if WHERRY_HAS_CUDA
  const bool over_link = !launch_options.threads && launch_options.ranks > 1;
  const Shared<Look> look;
  // In a process of its own: one that starts ranks must not have started CUDA.
  LaunchOptions one = launch_options;
  one.ranks = 1;
  one.threads = false;
  launch(one, [&](Group&) {
    const Devices devices = find_devices();
    look->machine.gpus = static_cast<int>(devices.found.size());
    std::snprintf(look->problem, sizeof(look->problem), "%s", devices.problem.c_str());
    if (!over_link || look->machine.gpus < 2) return;
    for (const DeviceDescription& gpu : devices.found) {
      look->link = look->link && (gpu.compute_major == 9 || gpu.compute_major == 10);
    }
    if (look->link) look->machine.link_gbps = bench::best_copy(bench::measure_link());
  });
  const GpuMachine machine = look->machine;
  WHERRY_CHECK(machine.gpus > 0, ErrorCode::unsupported, where,
               "--device cuda needs a GPU, and there is none: {}", look->problem);
  WHERRY_CHECK(
      look->link, ErrorCode::unsupported, where,
      "several GPUs are measured against their link, by copies that need chips of sm_90 or "
      "sm_100; --threads, or CUDA_VISIBLE_DEVICES, measures one");
  WHERRY_CHECK_ARGUMENT(
      machine.link_gbps == 0 || launch_options.ranks <= machine.gpus, Stage::none,
      "--ranks is {}; with {} GPUs, processes are measured with one rank a GPU, so "
      "it may be 1 to {}, or more with --threads on one GPU",
      launch_options.ranks, machine.gpus, machine.gpus);
  return machine;
#else
  static_cast<void>(launch_options);
  throw Error(ErrorCode::unsupported, where,
              fmt::format("--device cuda: this build has no CUDA: {}", find_devices().problem));
#endif
}

GpuReport measure_on_gpus(const GpuJob& job, const GpuMachine& machine) {
#if WHERRY_HAS_CUDA
  const bool several = machine.link_gbps > 0;
  const bench::RanksAs ranks_as = job.launch.threads ? bench::RanksAs::threads
                                  : several          ? bench::RanksAs::gpus
                                                     : bench::RanksAs::processes;
  const Shared<GpuReport> shared;
  try {
    bench::time_shape(
        ranks_as, shape_of(job), machine.link_gbps, job.replays,
        [&](const std::function<void(Group&)>& rank) {
          launch(job.launch, [&](Group& group) {
            Progress progress(group.rank() == 0);
            progress.tick(fmt::format("{} tokens a rank", job.config.max_tokens));
            rank(group);
          });
        },
        [&](const bench::ShapeTimes& times) { put_stages(times, *shared); });
  } catch (...) {
    clear_progress();
    throw;
  }
  GpuReport report = *shared;
  report.several_gpus = several;
  return report;
#else
  static_cast<void>(job);
  static_cast<void>(machine);
  return {};
#endif
}

Json gpu_bench_json(const GpuMeasurement& m) {
  const ExchangeConfig& c = m.job.config;
  const GpuReport& report = m.report;
  Json o = json_for("bench");
  add_shape(o, "cuda", m.job.launch.ranks, ranks_are(m.job), c);
  o["several_gpus"] = report.several_gpus;
  o["depth"] = c.depth;
  o["num_sms"] = report.num_sms;
  o["replays"] = m.job.replays;
  o["steps_per_replay"] = report.steps_per_replay;
  o["kernels"] = report.kernels;
  o["fabric"] = report.fabric;
  o["verified"] = true;  // time_shape() throws otherwise
  o["dispatch_us"] = report.dispatch.p50;
  o["combine_us"] = report.combine.p50;
  o["total_us"] = report.total.p50;
  o["bytes"] = report.bytes;
  o["copy_gbps"] = report.copy_gbps;
  o["floor_us"] = report.floor_us;
  o["floor_fraction"] = floor_fraction(report);
  o["window_bytes"] = report.window_bytes;
  add_spreads(o, stages(report));
  return o;
}

void print_gpu_bench(const GpuMeasurement& m) {
  const GpuReport& report = m.report;
  print_text(fmt::format(
      "{}\n{}"
      "  {} replays of a captured graph of {} steps, the slowest rank; each counts as their mean\n"
      "  step: dispatch with the plan in hand, combine; total: the plan made in the same call\n\n"
      "{:.0f} % of the floor: {} {} at {:.0f} GB/s\n"
      "{}verified: every row and output is right bit for bit, before and after\n",
      head_text(m, "with"), spread_table(stages(report)), m.job.replays, report.steps_per_replay,
      100.0 * floor_fraction(report), bytes_text(static_cast<double>(report.bytes)),
      report.several_gpus ? "of each rank over the link" : "read and written on the GPU",
      report.copy_gbps,
      report.several_gpus || m.job.launch.threads || m.job.launch.ranks == 1
          ? ""
          : "ranks that are processes share a GPU under CUDA MPS; without it they take turns\n"));
}

void print_gpu_bench_sweep(const std::vector<GpuMeasurement>& measurements) {
  using enum Table::Align;
  Table table({{"tokens", right},
               {"dispatch", right},
               {"with plan", right},
               {"combine", right},
               {"total", right},
               {"p99", right},
               {"floor", right},
               {"of floor", right}});
  for (const GpuMeasurement& m : measurements) {
    const GpuReport& r = m.report;
    table.add({count_text(m.job.config.max_tokens), time_text(r.dispatch.p50),
               time_text(r.plan_dispatch.p50), time_text(r.combine.p50), time_text(r.total.p50),
               time_text(r.total.p99), time_text(r.floor_us),
               fmt::format("{:.0f} %", 100.0 * floor_fraction(r))});
  }
  print_text(
      fmt::format("{}\n{}", head_text(measurements.back(), "with up to"), table.to_string(2)));
}

}  // namespace wherry::cli
