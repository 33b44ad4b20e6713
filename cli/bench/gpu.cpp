#include "bench/gpu.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <utility>

#include "gather.hpp"
#include "progress.hpp"
#include "report/table.hpp"
#include "support/build_info.hpp"
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

std::vector<std::pair<const char*, bench::Spread>> stages(const GpuReport& r) {
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
      "  layout {}, reduction {}, depth {}; kernels {}, fabric {}, windows of {}\n",
      m.report.several_gpus ? "several GPUs" : "one GPU", m.job.launch.ranks, ranks_are(m.job),
      tokens, c.max_tokens, c.experts, c.topk, c.hidden,
      c.dispatch_wire == Wire::same ? name(c.dtype) : name(c.dispatch_wire), name(c.layout),
      name(c.effective_reduction()), c.depth, m.report.kernels, m.report.fabric,
      bytes_text(static_cast<double>(m.report.window_bytes)));
}

#if WHERRY_HAS_CUDA

struct Machine {
  int gpus = 0;
  double link_gbps = 0;
  char problem[256] = {};
};
// In a process of its own: the one that starts ranks must not start CUDA.
Machine look_at_machine(bool link) {
  const Shared<Machine> machine;
  run_processes(1, [&](Group&) {
    const Devices devices = find_devices();
    machine->gpus = static_cast<int>(devices.found.size());
    std::snprintf(machine->problem, sizeof(machine->problem), "%s", devices.problem.c_str());
    if (link && machine->gpus > 1) machine->link_gbps = bench::best_copy(bench::measure_link());
  });
  return *machine;
}

bench::GpuShape shape_of(const GpuJob& job, bool several_gpus) {
  const ExchangeConfig& c = job.config;
  bench::GpuShape shape;
  shape.ranks = job.launch.ranks;
  shape.tokens = static_cast<int>(c.max_tokens);
  shape.hidden = static_cast<int>(c.hidden);
  shape.topk = c.topk;
  shape.experts = c.experts;
  shape.layout = c.layout;
  shape.reduction = c.effective_reduction();
  shape.sum_at = several_gpus ? std::nullopt : std::optional(SumAt::home);
  shape.depth = c.depth;
  shape.e4m3 = c.dispatch_wire == Wire::e4m3_block128;
  shape.kernels = c.kernels.c_str();
  shape.num_sms = c.num_sms;
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
  std::snprintf(report.kernels, sizeof(report.kernels), "%s", times.kernels.c_str());
  std::snprintf(report.fabric, sizeof(report.fabric), "%s", times.fabric.c_str());
}

#endif  // WHERRY_HAS_CUDA

}  // namespace

GpuReport measure_on_gpus(const GpuJob& job) {
#if WHERRY_HAS_CUDA
  const Machine machine = look_at_machine(!job.launch.threads && job.launch.ranks > 1);
  WHERRY_CHECK(machine.gpus > 0, ErrorCode::unsupported, (Error::Where{Stage::startup, -1, -1}),
               "--device cuda needs a GPU, and there is none: {}", machine.problem);
  const bool several = machine.link_gbps > 0;
  const bench::RanksAs ranks_as = job.launch.threads ? bench::RanksAs::threads
                                  : several          ? bench::RanksAs::gpus
                                                     : bench::RanksAs::processes;
  const Shared<GpuReport> shared;
  try {
    bench::time_shape(
        ranks_as, shape_of(job, several), machine.link_gbps, job.replays,
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
  throw Error(ErrorCode::unsupported, {Stage::startup, -1, -1},
              fmt::format("--device cuda: {}", find_devices().problem));
#endif
}

Json gpu_bench_json(const GpuMeasurement& m) {
  const ExchangeConfig& c = m.job.config;
  const GpuReport& report = m.report;
  Json o = json_for("bench");
  o["device"] = "cuda";
  o["several_gpus"] = report.several_gpus;
  o["ranks"] = m.job.launch.ranks;
  o["ranks_are"] = ranks_are(m.job);
  o["tokens"] = c.max_tokens;
  o["hidden"] = c.hidden;
  o["topk"] = c.topk;
  o["experts"] = c.experts;
  o["layout"] = name(c.layout);
  o["reduction"] = name(c.effective_reduction());
  o["wire"] = name(c.dispatch_wire);
  o["depth"] = c.depth;
  o["num_sms"] = c.num_sms;
  o["steps"] = m.job.replays;
  o["kernels"] = report.kernels;
  o["fabric"] = report.fabric;
  o["verified"] = true;  // time_shape() throws otherwise
  o["total_us"] = report.total.p50;
  o["bytes"] = report.bytes;
  o["copy_gbps"] = report.copy_gbps;
  o["floor_us"] = report.floor_us;
  o["floor_fraction"] = floor_fraction(report);
  o["window_bytes"] = report.window_bytes;
  for (const auto& [stage, spread] : stages(report)) {
    const std::string field = fmt::format("{}_us", stage);
    o["p50"][field] = spread.p50;
    o["p99"][field] = spread.p99;
    o["min"][field] = spread.min;
  }
  return o;
}

void print_gpu_bench(const GpuMeasurement& m) {
  using enum Table::Align;
  const GpuReport& report = m.report;
  Table table({{"stage", left}, {"p50", right}, {"p99", right}, {"min", right}});
  for (const auto& [stage, spread] : stages(report)) {
    table.add({stage, time_text(spread.p50), time_text(spread.p99), time_text(spread.min)});
  }
  print_text(fmt::format(
      "{}\n{}  whole steps in a captured graph, {} replays, the slowest rank of each; dispatch "
      "with\n"
      "  the plan in hand or made in the same call; step: dispatch, combine; total: the plan "
      "too\n\n"
      "{:.0f} % of the floor: {} {} at {:.0f} GB/s\n"
      "verified: every row and output is right bit for bit, before and after\n",
      head_text(m, "with"), table.to_string(2), m.job.replays, 100.0 * floor_fraction(report),
      bytes_text(static_cast<double>(report.bytes)),
      report.several_gpus ? "of each rank over the link" : "read and written on the GPU",
      report.copy_gbps));
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
