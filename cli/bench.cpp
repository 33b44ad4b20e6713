// wherry bench: plan, dispatch and combine over N ranks of this machine, verified, then timed beside
// the floor of plain copies. What is measured and how: bench/measure.hpp; on GPUs: bench/gpu.hpp.
#include <fmt/format.h>

#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <vector>

#include "bench/gpu.hpp"
#include "bench/print.hpp"
#include "command.hpp"
#include "exchange/config.hpp"
#include "experts/expert_hidden.hpp"
#include "gather.hpp"
#include "measure.hpp"
#include "options.hpp"
#include "progress.hpp"
#include "report/table.hpp"
#include "support/check.hpp"

namespace wherry::cli {
namespace {

struct BenchOptions {
  LaunchOptions launch;
  ShapeOptions shape;
  ExchangeOptions exchange;
  unsigned seed = 1;
  std::int64_t rows_per_slot = 0;
  std::int64_t receive_rows = 0;
  int alignment = 1;
  std::optional<int> threads_per_rank;
  int num_sms = 0;
  bool identity = true;
  bool halves = false;
  bool sweep = false;
  int steps = 30;
  int warmup = 5;
  bool json = false;
};

bench::Job settle(const BenchOptions& options, std::int64_t tokens) {
  const Model model = options.shape.resolve();
  bench::Job job;
  job.shape = {options.launch.ranks, tokens, model.hidden, model.topk, model.experts, options.seed};
  job.config = options.exchange.config(model, tokens, options.launch);
  job.config.rows_per_slot = options.rows_per_slot;
  job.config.receive_rows = options.receive_rows;
  job.config.alignment = options.alignment;
  job.config.num_threads =
      options.threads_per_rank.value_or(threads_per_rank(options.launch.ranks));
  job.processes = !options.launch.threads;
  job.experts = options.identity ? bench::Experts::identity : bench::Experts::scale;
  job.halves = options.halves;
  job.steps = options.steps;
  job.warmup = options.warmup;
  return job;
}

// Throws out_of_memory before anything is allocated. The floor takes a window too, at most as large
// as the exchange's; a twentieth stays free for tokens and results.
void check_memory(const bench::Job& job) {
  const std::uint64_t window = job.config.window_bytes(job.shape.ranks);
  const std::uint64_t available = available_memory();
  const auto windows = 2 * static_cast<std::uint64_t>(job.shape.ranks);
  if (window <= (available - available / 20) / windows) return;
  throw Error(
      ErrorCode::out_of_memory, {Stage::startup, -1, -1},
      fmt::format("no memory: {} windows of {} (every rank's, and as many for the floor) do "
                  "not fit in the {} available; choose fewer --tokens or --ranks, or set "
                  "--receive-rows or --rows-per-slot",
                  windows, bytes_text(static_cast<double>(window)),
                  bytes_text(static_cast<double>(available))));
}

bench::Report run_job(const BenchOptions& options, const bench::Job& job) {
  const Shared<bench::Report> shared;
  try {
    launch(options.launch, [&](Group& group) {
      Progress progress(group.rank() == 0);
      const auto report = bench::measure(group, job, [&](std::string_view text) {
        progress.tick(fmt::format("{} tokens a rank: {}", job.shape.tokens, text));
      });
      if (group.rank() == 0) *shared = report;
    });
  } catch (...) {
    clear_progress();
    throw;
  }
  return *shared;
}

// Tokens of the measurements, ascending.
std::vector<std::int64_t> token_counts(const BenchOptions& options) {
  std::vector<std::int64_t> counts;
  for (std::int64_t tokens = 1; options.sweep && tokens < options.shape.tokens; tokens *= 2) {
    counts.push_back(tokens);
  }
  counts.push_back(options.shape.tokens);
  return counts;
}

// `given`: whether a flag was.
void check_for_gpus(const BenchOptions& options, const std::function<bool(const char*)>& given) {
  for (const char* flag : {"--combine-wire", "--rows-per-slot", "--receive-rows", "--alignment",
                           "--halves", "--threads-per-rank", "--identity", "--warmup", "--seed"}) {
    WHERRY_CHECK_ARGUMENT(!given(flag), Stage::none,
                          "{} goes with --device cpu; on cuda graphs of whole steps are replayed, "
                          "with tokens, experts and sizes of their own",
                          flag);
  }
  WHERRY_CHECK_ARGUMENT(
      options.exchange.wire == Wire::same || options.exchange.wire == Wire::e4m3_block128,
      Stage::none, "--wire is {}; with --device cuda it may be same or e4m3_block128",
      name(options.exchange.wire));
}

int run_gpu_bench(const BenchOptions& options) {
  constexpr int kMostReplays = 1000;  // others wait for the rank that replays
  WHERRY_CHECK_ARGUMENT(options.steps <= kMostReplays, Stage::none,
                        "--steps is {}; with --device cuda it is a number of replays, 1 to {}",
                        options.steps, kMostReplays);
  const Model model = options.shape.resolve();
  for (const std::int64_t tokens : token_counts(options)) {
    check_config(options.exchange.config(model, tokens, options.launch), -1, options.launch.ranks);
  }
  const GpuMachine machine = look_at_machine(options.launch);
  std::vector<GpuMeasurement> measurements;
  for (const std::int64_t tokens : token_counts(options)) {
    GpuJob job{options.launch, options.exchange.config(model, tokens, options.launch),
               options.steps};
    job.config.num_sms = options.num_sms;
    measurements.push_back({job, measure_on_gpus(job, machine)});
    if (options.json) print_json(gpu_bench_json(measurements.back()));
  }
  if (options.json) return kOk;
  if (options.sweep) {
    print_gpu_bench_sweep(measurements);
  } else {
    print_gpu_bench(measurements.back());
  }
  return kOk;
}

int run_bench(const BenchOptions& options, const std::function<bool(const char*)>& given) {
  if (options.launch.device == Device::Kind::cuda) {
    check_for_gpus(options, given);
    return run_gpu_bench(options);
  }
  WHERRY_CHECK_ARGUMENT(!given("--num-sms"), Stage::none, "--num-sms goes with --device cuda");
  std::vector<bench::Job> jobs;
  for (const std::int64_t tokens : token_counts(options)) jobs.push_back(settle(options, tokens));
  check_memory(jobs.back());
  std::vector<Measurement> measurements;
  for (const bench::Job& job : jobs) {
    measurements.push_back({job, run_job(options, job)});
    if (options.json) print_json(bench_json(measurements.back()));
  }
  if (options.json) return kOk;
  if (options.sweep) {
    print_bench_sweep(measurements);
  } else {
    print_bench(measurements.back());
  }
  return kOk;
}

void add_rows_options(CLI::App& command, BenchOptions& options) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  command.add_option("--rows-per-slot", options.rows_per_slot, "slots: rows each slot accepts")
      ->check(whole_number(1, kMost))
      ->type_name("N");
  command
      .add_option("--receive-rows", options.receive_rows,
                  "grouped, tokens: most rows a rank accepts")
      ->check(whole_number(1, kMost))
      ->type_name("N");
  command
      .add_option("--alignment", options.alignment,
                  "grouped: the rows of each slot are padded to a multiple of this")
      ->check(whole_number(1, 1 << 20))
      ->type_name("N");
}

void add_measuring_options(CLI::App& command, BenchOptions& options) {
  command.add_flag("--halves", options.halves,
                   "Begin as many dispatches as --depth allows before the first is finished, "
                   "likewise their combines; times are shares of one");
  command
      .add_option("--threads-per-rank", options.threads_per_rank,
                  "Threads each rank copies and sums with [its share of the cores]")
      ->check(whole_number(1, 1024))
      ->type_name("N");
  command.add_flag("--identity,!--no-identity", options.identity,
                   "Timed steps whose experts return their rows (the default), or else "
                   "y = x * (1 + slot/64); the experts' time is never part of the total");
  command.add_option("--steps", options.steps, "Timed repetitions")
      ->check(whole_number(1, 1000000))
      ->type_name("N")
      ->capture_default_str();
  command.add_option("--warmup", options.warmup, "Repetitions before them, at least --depth")
      ->check(whole_number(0, 1000000))
      ->type_name("N")
      ->capture_default_str();
  command.add_option("--seed", options.seed, "Of tokens, weights and routing")
      ->check(whole_number(0, std::numeric_limits<std::int32_t>::max()))
      ->type_name("N")
      ->capture_default_str();
  command
      .add_option("--num-sms", options.num_sms,
                  "cuda: multiprocessors of each rank [its share of the GPU, at most 16]")
      ->check(whole_number(1, 1024))
      ->type_name("N");
  command.add_flag("--sweep", options.sweep, "Measure 1, 2, 4, ... tokens, up to --tokens");
  command.add_flag("--json", options.json,
                   "One JSON object a measurement on stdout, and nothing else");
}

}  // namespace

void add_bench(CLI::App& app, Run& run) {
  CLI::App* command = app.add_subcommand(
      "bench", "Time plan, dispatch and combine, beside the floor of plain copies");
  const auto options = std::make_shared<BenchOptions>();
  add_launch_options(*command, options->launch);
  add_device_option(*command, options->launch);
  add_shape_options(*command, options->shape);
  add_exchange_options(*command, options->exchange);
  add_rows_options(*command, *options);
  add_measuring_options(*command, *options);
  command->callback([&run, options, command] {
    run = [options, command] {
      return run_bench(*options, [command](const char* flag) { return command->count(flag) > 0; });
    };
  });
}

}  // namespace wherry::cli
