#include "bench/print.hpp"

#include <fmt/format.h>

#include <string>
#include <utility>

#include "report/table.hpp"

namespace wherry::cli {
namespace {

using bench::Report;

const char* ranks_are(const bench::Job& job) { return job.processes ? "processes" : "threads"; }

const char* stores(const Report& report) {
  return report.floor_with == bench::Stores::streaming ? "streaming" : "ordinary";
}

double floor_fraction(const Report& report) {
  return report.total.p50 > 0 ? report.floor.p50 / report.total.p50 : 0.0;
}

Stages stages(const Report& r) {
  return {{"plan", r.plan},
          {"dispatch", r.dispatch},
          {"dispatch_send", r.dispatch_send},
          {"dispatch_recv", r.dispatch_recv},
          {"experts", r.experts},
          {"combine", r.combine},
          {"combine_send", r.combine_send},
          {"combine_recv", r.combine_recv},
          {"total", r.total},
          {"floor", r.floor}};
}

// What the number formats on the way do; empty without any.
std::string formats_text(const Measurement& m) {
  const ExchangeConfig& config = m.job.config;
  if (config.dispatch_wire == Wire::same && config.combine_wire == Wire::same) return {};
  return fmt::format("\nformats: {} to the experts, {} home; they change the outputs by {:.2g} rms",
                     name(config.dispatch_wire), name(config.combine_wire), m.report.wire_error);
}

// `tokens`: "with" or "with up to".
std::string head_text(const Measurement& m, const char* tokens) {
  const bench::Shape& shape = m.job.shape;
  const ExchangeConfig& config = m.job.config;
  return fmt::format(
      "Plan, dispatch and combine over {} rank {} {} {} tokens each\n"
      "  {} experts, {} a token, hidden {}\n"
      "  layout {}, reduction {}, depth {}; kernels {}, fabric {}, windows of {}\n",
      shape.ranks, ranks_are(m.job), tokens, shape.tokens, shape.experts, shape.topk, shape.hidden,
      name(config.layout), name(config.effective_reduction()), config.depth, m.report.kernels,
      m.report.fabric, bytes_text(static_cast<double>(m.report.window_bytes)));
}

}  // namespace

void add_shape(Json& object, const char* device, int ranks, const char* ranks_are,
               const ExchangeConfig& config) {
  object["device"] = device;
  object["ranks"] = ranks;
  object["ranks_are"] = ranks_are;
  object["tokens"] = config.max_tokens;
  object["hidden"] = config.hidden;
  object["topk"] = config.topk;
  object["experts"] = config.experts;
  object["layout"] = name(config.layout);
  object["reduction"] = name(config.effective_reduction());
  object["wire"] = name(config.dispatch_wire);
}

void add_spreads(Json& object, const Stages& stages) {
  for (const auto& [stage, spread] : stages) {
    const std::string field = fmt::format("{}_us", stage);
    object["p50"][field] = spread.p50;
    object["p99"][field] = spread.p99;
    object["min"][field] = spread.min;
  }
}

std::string spread_table(const Stages& stages) {
  using enum Table::Align;
  Table table({{"stage", left}, {"p50", right}, {"p99", right}, {"min", right}});
  for (const auto& [stage, spread] : stages) {
    const std::string text = stage;
    const bool half = text.ends_with("_send") || text.ends_with("_recv");
    table.add({(half ? "  " : "") + text, time_text(spread.p50), time_text(spread.p99),
               time_text(spread.min)});
  }
  return table.to_string(2);
}

Json bench_json(const Measurement& m) {
  const bench::Job& job = m.job;
  const Report& report = m.report;
  Json o = json_for("bench");
  add_shape(o, "cpu", job.shape.ranks, ranks_are(job), job.config);
  o["combine_wire"] = name(job.config.combine_wire);
  o["expert"] = job.experts == bench::Experts::identity ? "identity" : "scale";
  o["depth"] = job.config.depth;
  o["halves"] = job.halves;
  o["alignment"] = job.config.alignment;
  o["rows_per_slot"] = job.config.rows_per_slot;
  o["receive_rows"] = job.config.receive_rows;
  o["threads_per_rank"] = job.config.num_threads;
  o["steps"] = job.steps;
  o["seed"] = job.shape.seed;
  o["kernels"] = report.kernels;
  o["fabric"] = report.fabric;
  o["verified"] = true;  // measure() throws otherwise
  o["plan_us"] = report.plan.p50;
  o["dispatch_us"] = report.dispatch.p50;
  o["combine_us"] = report.combine.p50;
  o["total_us"] = report.total.p50;
  o["bytes"] = report.bytes;
  o["link_bytes"] = report.link_bytes;
  o["wire_error"] = report.wire_error;
  o["copy_gbps"] = report.copy_gbps;
  o["floor_us"] = report.floor.p50;
  o["floor_fraction"] = floor_fraction(report);
  o["floor_stores"] = stores(report);
  o["involuntary_switches"] = report.involuntary_switches;
  o["worst_involuntary_switches"] = report.worst_switches;
  o["window_bytes"] = report.window_bytes;
  add_spreads(o, stages(report));
  return o;
}

void print_bench(const Measurement& m) {
  const Report& report = m.report;
  print_text(fmt::format(
      "{}\n{}  times of the slowest rank, {} steps; total: all ranks, without the experts\n\n"
      "{} of rows a step, {} of them between ranks{}\n"
      "{:.0f} % of the floor: plain copies of the same rows by {} stores, {:.1f} GB/s\n"
      "{:.2f} involuntary switches a step and rank\n"
      "verified: every output equals the dense reference bit for bit\n",
      head_text(m, "with"), spread_table(stages(report)), m.job.steps,
      bytes_text(static_cast<double>(report.bytes)),
      bytes_text(static_cast<double>(report.link_bytes)), formats_text(m),
      100.0 * floor_fraction(report), stores(report), report.copy_gbps,
      report.involuntary_switches));
}

void print_bench_sweep(const std::vector<Measurement>& measurements) {
  using enum Table::Align;
  Table table({{"tokens", right},
               {"plan", right},
               {"dispatch", right},
               {"combine", right},
               {"total", right},
               {"p99", right},
               {"floor", right},
               {"of floor", right}});
  for (const Measurement& m : measurements) {
    const Report& r = m.report;
    table.add({count_text(m.job.shape.tokens), time_text(r.plan.p50), time_text(r.dispatch.p50),
               time_text(r.combine.p50), time_text(r.total.p50), time_text(r.total.p99),
               time_text(r.floor.p50), fmt::format("{:.0f} %", 100.0 * floor_fraction(r))});
  }
  print_text(
      fmt::format("{}\n{}", head_text(measurements.back(), "with up to"), table.to_string(2)));
}

}  // namespace wherry::cli
