// wherry bench: plan, dispatch and combine over N ranks of this machine, verified, then timed beside
// the floor of plain copies. What is measured and how: bench/measure.hpp.
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "command.hpp"
#include "machine.hpp"
#include "measure.hpp"
#include "report/output.hpp"
#include "report/table.hpp"
#include "route/models.hpp"
#include "support/check.hpp"

namespace wherry::cli {
namespace {

using bench::Job;
using bench::Report;
using bench::Spread;

struct Options {
  Job job;
  std::string model;
  bool identity = true;
  bool threads = false;
  bool processes = false;
  bool sweep = false;
  bool json = false;
};

// --- The measurement as one JSON object ---------------------------------------------------------

Json stages(const Report& r, double Spread::* quantile) {
  return {{"plan_us", r.plan.*quantile},
          {"dispatch_send_us", r.dispatch_send.*quantile},
          {"dispatch_recv_us", r.dispatch_recv.*quantile},
          {"dispatch_us", r.dispatch.*quantile},
          {"experts_us", r.experts.*quantile},
          {"combine_send_us", r.combine_send.*quantile},
          {"combine_recv_us", r.combine_recv.*quantile},
          {"combine_us", r.combine.*quantile},
          {"total_us", r.total.*quantile},
          {"floor_us", r.floor.*quantile}};
}

Json as_json(const Job& job, const Report& r) {
  Json o = json_for("bench");
  o["ranks"] = job.shape.ranks;
  o["ranks_are"] = job.processes ? "processes" : "threads";
  o["tokens"] = job.shape.tokens;
  o["hidden"] = job.shape.hidden;
  o["topk"] = job.shape.topk;
  o["experts"] = job.shape.experts;
  o["layout"] = name(job.layout);
  o["reduction"] = r.reduction;
  o["expert"] = job.experts == bench::Experts::identity ? "identity" : "scale";
  o["depth"] = job.depth;
  o["halves"] = job.halves;
  o["alignment"] = job.alignment;
  o["rows_per_slot"] = job.rows_per_slot;
  o["receive_rows"] = job.receive_rows;
  o["threads_per_rank"] = job.threads_per_rank;
  o["steps"] = job.steps;
  o["seed"] = job.shape.seed;
  o["kernels"] = r.kernels;
  o["fabric"] = r.fabric;
  o["verified"] = true;  // measure() throws otherwise
  o["plan_us"] = r.plan.p50;
  o["dispatch_us"] = r.dispatch.p50;
  o["combine_us"] = r.combine.p50;
  o["total_us"] = r.total.p50;
  o["bytes"] = r.bytes;
  o["link_bytes"] = r.link_bytes;
  o["copy_gbps"] = r.copy_gbps;
  o["floor_us"] = r.floor.p50;
  o["floor_fraction"] = r.total.p50 > 0 ? r.floor.p50 / r.total.p50 : 0.0;
  o["floor_stores"] = r.floor_with;
  o["involuntary_switches"] = r.involuntary_switches;
  o["worst_involuntary_switches"] = r.worst_switches;
  o["window_bytes"] = r.window_bytes;
  o["p50"] = stages(r, &Spread::p50);
  o["p99"] = stages(r, &Spread::p99);
  o["min"] = stages(r, &Spread::min);
  return o;
}

// --- Running it ---------------------------------------------------------------------------------

// Brings the object from rank 0, which may be another process, to this one. It fits the buffer of a
// pipe many times over, so that the writer never waits.
class Channel {
 public:
  Channel() {
    WHERRY_CHECK(pipe2(ends_, O_CLOEXEC) == 0, ErrorCode::system,
                 (Error::Where{Stage::startup, -1, -1}), "no pipe for the result");
  }
  ~Channel() {
    close(ends_[0]);
    close(ends_[1]);
  }
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  void send(const Json& object) const {
    const std::string text = object.dump() + "\n";
    const ssize_t written = write(ends_[1], text.data(), text.size());
    WHERRY_CHECK(written == static_cast<ssize_t>(text.size()), ErrorCode::system,
                 (Error::Where{Stage::none, 0, -1}), "cannot hand over the result");
  }
  [[nodiscard]] Json receive() const {
    std::string text;
    char buffer[4096];
    while (text.empty() || text.back() != '\n') {
      const ssize_t count = read(ends_[0], buffer, sizeof(buffer));
      WHERRY_CHECK(count > 0, ErrorCode::system, (Error::Where{Stage::none, -1, 0}),
                   "rank 0 left no result");
      text.append(buffer, static_cast<std::size_t>(count));
    }
    return Json::parse(text);
  }

 private:
  int ends_[2] = {-1, -1};
};

Json run_job(const Job& job) {
  const Channel channel;
  const auto rank = [&](Group& group) {
    const Report report = bench::measure(group, job);
    if (group.rank() == 0) channel.send(as_json(job, report));
  };
  if (job.processes) {
    run_processes(job.shape.ranks, rank);
  } else {
    run_threads(job.shape.ranks, rank);
  }
  return channel.receive();
}

// What a rank would say too, but before any is started.
void check(const Job& job) {
  WHERRY_CHECK_ARGUMENT(job.shape.topk <= job.shape.experts, Stage::route,
                        "topk is {}; a token chooses distinct experts, and there are {}",
                        job.shape.topk, job.shape.experts);
  const auto ranks = static_cast<std::uint64_t>(job.shape.ranks);
  const std::uint64_t window = job.config().window_bytes(job.shape.ranks);
  WHERRY_CHECK_ARGUMENT(window * ranks <= total_memory() / 10 * 9, Stage::startup,
                        "{} windows of {} do not fit in the {} of this machine; ask for fewer "
                        "ranks or tokens, or set --receive-rows or --rows-per-slot",
                        ranks, bytes_text(static_cast<double>(window)),
                        bytes_text(static_cast<double>(total_memory())));
}

// --- For people ---------------------------------------------------------------------------------

std::string heading(const Json& o) {
  return fmt::format(
      "{} ranks as {}, {} tokens each, hidden {}, top-{} of {} experts, {} by {} kernels\n"
      "layout {}, reduction {}, window {} a rank; results equal the dense reference bit for bit\n",
      o["ranks"].get<int>(), o["ranks_are"].get<std::string>(), o["tokens"].get<std::int64_t>(),
      o["hidden"].get<std::int64_t>(), o["topk"].get<int>(), o["experts"].get<int>(),
      o["fabric"].get<std::string>(), o["kernels"].get<std::string>(),
      o["layout"].get<std::string>(), o["reduction"].get<std::string>(),
      bytes_text(o["window_bytes"].get<double>()));
}

std::string stage_table(const Json& o) {
  using enum Table::Align;
  Table table({{"stage", left}, {"p50", right}, {"p99", right}, {"min", right}});
  for (const auto& [key, value] : o["p50"].items()) {
    const std::string stage = key.substr(0, key.size() - 3);
    const bool half = stage.ends_with("_send") || stage.ends_with("_recv");
    table.add({(half ? "  " : "") + stage, time_text(value.get<double>()),
               time_text(o["p99"][key].get<double>()), time_text(o["min"][key].get<double>())});
  }
  return table.to_string(2);
}

void print_one(const Json& o) {
  print_text(fmt::format(
      "{}\n{}\n"
      "total is plan + dispatch + combine, without the experts; {} of rows a step ({} of them\n"
      "between ranks); {:.0f} % of the floor of plain {} copies at {:.1f} GB/s;\n"
      "{:.2f} involuntary switches a step and rank\n",
      heading(o), stage_table(o), bytes_text(o["bytes"].get<double>()),
      bytes_text(o["link_bytes"].get<double>()), 100.0 * o["floor_fraction"].get<double>(),
      o["floor_stores"].get<std::string>(), o["copy_gbps"].get<double>(),
      o["involuntary_switches"].get<double>()));
}

void print_sweep(const std::vector<Json>& objects) {
  using enum Table::Align;
  Table table({{"tokens", right},
               {"plan", right},
               {"dispatch", right},
               {"combine", right},
               {"total", right},
               {"p99", right},
               {"floor", right},
               {"of floor", right}});
  for (const Json& o : objects) {
    const auto time = [&](const char* field) { return time_text(o[field].get<double>()); };
    table.add({count_text(o["tokens"].get<std::int64_t>()), time("plan_us"), time("dispatch_us"),
               time("combine_us"), time("total_us"), time_text(o["p99"]["total_us"].get<double>()),
               time("floor_us"),
               fmt::format("{:.0f} %", 100.0 * o["floor_fraction"].get<double>())});
  }
  print_text(heading(objects.back()) + "\n" + table.to_string(2));
}

int run_bench(const Options& options) {
  std::vector<Job> jobs{options.job};
  if (options.sweep) {
    jobs.clear();
    for (std::int64_t tokens = 1;; tokens *= 2) {
      jobs.push_back(options.job);
      jobs.back().shape.tokens = std::min(tokens, options.job.shape.tokens);
      if (tokens >= options.job.shape.tokens) break;
    }
  }
  check(options.job);  // the largest of them
  std::vector<Json> results;
  for (const Job& job : jobs) {
    results.push_back(run_job(job));
    if (options.json) print_json(results.back());
  }
  if (!options.json) {
    if (options.sweep) {
      print_sweep(results);
    } else {
      print_one(results.front());
    }
  }
  return kOk;
}

// --- Arguments ----------------------------------------------------------------------------------

template <typename Enum>
std::map<std::string, Enum> names(std::initializer_list<Enum> values) {
  std::map<std::string, Enum> result;
  for (const Enum value : values) result.emplace(name(value), value);
  return result;
}

void add_shape(CLI::App& command, Options& options) {
  bench::Shape& shape = options.job.shape;
  command.add_option("--ranks", shape.ranks, "Ranks")->check(CLI::Range(1, 1024));
  auto* const threads = command.add_flag("--threads", options.threads, "Ranks are threads");
  command.add_flag("--processes", options.processes, "Ranks are processes (the default)")
      ->excludes(threads);
  command.add_option("--tokens", shape.tokens, "Tokens a rank")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 24));
  auto* const hidden = command.add_option("--hidden", shape.hidden, "Elements of a token, in bf16");
  hidden->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 24));
  auto* const topk = command.add_option("--topk", shape.topk, "Experts a token chooses");
  topk->check(CLI::Range(1, 64));
  auto* const experts = command.add_option("--experts", shape.experts, "Experts of all ranks");
  experts->check(CLI::Range(1, 1 << 20));
  command
      .add_option_function<std::string>(
          "--model",
          [&options](const std::string& model) {
            const Model& found = find_model(model);
            options.job.shape.hidden = found.hidden;
            options.job.shape.topk = found.topk;
            options.job.shape.experts = found.experts;
          },
          "Hidden, topk and experts of a public model; `wherry info` lists them")
      ->excludes(hidden)
      ->excludes(topk)
      ->excludes(experts);
  command.add_option("--seed", shape.seed, "Of tokens, routing and weights");
}

void add_exchange(CLI::App& command, Options& options) {
  Job& job = options.job;
  command.add_option("--layout", job.layout, "How received rows lie: grouped, tokens or slots")
      ->transform(CLI::CheckedTransformer(names({Layout::grouped, Layout::tokens, Layout::slots})));
  command
      .add_option("--reduction", job.reduction,
                  "What goes home: by_token or by_rank (default: by_token for slots, else by_rank)")
      ->transform(CLI::CheckedTransformer(names({Reduction::by_token, Reduction::by_rank})));
  command.add_option("--depth", job.depth, "Dispatches that may be in flight at once");
  command.add_flag("--halves", job.halves,
                   "Put `depth` dispatches in flight before the first is finished, likewise their "
                   "combines; times are a share of one");
  command.add_option("--rows-per-slot", job.rows_per_slot, "slots: rows each slot accepts");
  command.add_option("--receive-rows", job.receive_rows,
                     "grouped, tokens: most rows a rank accepts");
  command.add_option("--alignment", job.alignment,
                     "grouped: segments are multiples of this many rows");
  command.add_option("--kernels", job.kernels, "Kernel set by name; `wherry info` lists them");
  command.add_option("--threads-per-rank", job.threads_per_rank, "Threads that copy and sum")
      ->check(CLI::Range(1, 1024));
}

void add_measurement(CLI::App& command, Options& options) {
  command.add_flag("--identity,!--no-identity", options.identity,
                   "Timed steps with experts that return their rows (the default), or with "
                   "y = x * (1 + slot/64); their time is never part of the total");
  command.add_option("--steps", options.job.steps, "Timed steps")->check(CLI::Range(1, 1000000));
  command
      .add_option("--warmup", options.job.warmup, "Steps before them; at least `depth` are taken")
      ->check(CLI::Range(0, 1000000));
  command.add_flag("--sweep", options.sweep, "1, 2, 4, ... tokens, up to --tokens");
  command.add_flag("--json", options.json, "One JSON object a measurement on stdout");
}

}  // namespace

void add_bench(CLI::App& app, Run& run) {
  CLI::App* command = app.add_subcommand(
      "bench", "Time plan, dispatch and combine, beside the floor of plain copies");
  const auto options = std::make_shared<Options>();
  add_shape(*command, *options);
  add_exchange(*command, *options);
  add_measurement(*command, *options);
  command->callback([&run, options] {
    options->job.processes = !options->threads;
    options->job.experts = options->identity ? bench::Experts::identity : bench::Experts::scale;
    run = [options] { return run_bench(*options); };
  });
}

}  // namespace wherry::cli
