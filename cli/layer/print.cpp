// The outcome of `wherry layer`, for programs and for people.
#include <fmt/format.h>

#include <algorithm>
#include <span>
#include <string>

#include "layer/job.hpp"
#include "report/bars.hpp"
#include "report/output.hpp"
#include "report/table.hpp"

namespace wherry::cli {

namespace {

const char* ranks_are(const LayerJob& job) { return job.launch.threads ? "threads" : "processes"; }

std::string router_text(const Model& model) {
  std::string text(name(model.score));
  if (model.groups > 1) text += fmt::format(", {} of {} groups", model.groups_kept, model.groups);
  if (model.bias) text += ", biased";
  if (model.normalize) text += ", normalised";
  if (model.scale != 1.0F) text += fmt::format(", times {:g}", model.scale);
  if (model.weight_on_input) text += ", weight on the input";
  return text;
}

// Empty without formats on the way.
std::string wires_text(const ExchangeConfig& config) {
  if (config.dispatch_wire == Wire::same && config.combine_wire == Wire::same) return {};
  return fmt::format("  rows travel as {}, results as {}\n", name(config.dispatch_wire),
                     name(config.combine_wire));
}

std::string alike_text(const ExchangeConfig& config) {
  if (config.replicated == 1) return "each";
  return fmt::format("for every {} of them alike", config.replicated);
}

std::string loads_text(const LayerJob& job, const LayerOutcome& outcome) {
  const std::span<const std::int64_t> loads(outcome.loads,
                                            static_cast<std::size_t>(job.model.experts));
  const std::span<const std::int64_t> ranks(outcome.rank_rows,
                                            static_cast<std::size_t>(job.launch.ranks));
  const auto [least, most] = std::ranges::minmax(loads);
  std::string text = fmt::format("  expert load  {}  {} to {} tokens\n", bars_text(loads),
                                 count_text(least), count_text(most));
  text += fmt::format("  rank load    {}  largest {:.2f} of the mean", bars_text(ranks),
                      outcome.imbalance);
  if (job.replicas > 0) {
    text += fmt::format("; {:.2f} before {} replicas were placed", outcome.imbalance_before,
                        job.replicas);
  }
  return text + "\n\n";
}

std::string head_text(const LayerJob& job, const LayerOutcome& outcome) {
  const Model& model = job.model;
  const std::string width =
      job.expert_hidden_sentence.empty()
          ? fmt::format("expert hidden {}: weights of {}", model.expert_hidden,
                        bytes_text(static_cast<double>(outcome.weight_bytes)))
          : job.expert_hidden_sentence;
  const std::string text = fmt::format(
      "One Mixture-of-Experts layer of {}, over {} rank {} with {} tokens {}\n"
      "  {} experts, {} a token, hidden {}; router {}\n  {}\n",
      model.name, job.launch.ranks, ranks_are(job), job.tokens, alike_text(job.config),
      model.experts, model.topk, model.hidden, router_text(model), width);
  return text + wires_text(job.config) +
         fmt::format("  layout {}, reduction {}, depth {}; kernels {}, fabric {}, experts {}\n",
                     name(job.config.layout), name(job.config.effective_reduction()),
                     job.config.depth, outcome.kernels, outcome.fabric, outcome.experts_by);
}

std::string stages_text(const LayerOutcome& outcome) {
  using enum Table::Align;
  Table table({{"stage", left}, {"p50", right}, {"p99", right}, {"rows", right}, {"bytes", right}});
  const auto add = [&](const char* stage, const Percentiles& time, std::string rows,
                       std::string bytes) {
    table.add({stage, time_text(time.p50), time_text(time.p99), std::move(rows), std::move(bytes)});
  };
  const auto add_counted = [&](const char* stage, const Percentiles& time, std::int64_t rows,
                               std::int64_t bytes) {
    if (!outcome.counts_traffic) return add(stage, time, "", "");
    add(stage, time, count_text(rows), bytes_text(static_cast<double>(bytes)));
  };
  add("plan", outcome.plan, "", "");
  add_counted("dispatch", outcome.dispatch, outcome.dispatch_rows, outcome.dispatch_bytes);
  add("experts", outcome.experts, count_text(outcome.rows_received), "");
  add_counted("combine", outcome.combine, outcome.combine_rows, outcome.combine_bytes);
  return table.to_string(2);
}

}  // namespace

void print_layer_json(const LayerJob& job, const LayerOutcome& outcome) {
  Json object = json_for("layer");
  object["ranks"] = job.launch.ranks;
  object["ranks_are"] = ranks_are(job);
  object["device"] = name(job.launch.device);
  object["model"] = job.model.name;
  object["tokens"] = job.tokens;
  object["hidden"] = job.model.hidden;
  object["experts"] = job.model.experts;
  object["topk"] = job.model.topk;
  object["expert_hidden"] = job.model.expert_hidden;
  if (!job.expert_hidden_sentence.empty()) {
    object["expert_hidden_chosen"] = job.expert_hidden_sentence;
  }
  object["layout"] = name(job.config.layout);
  object["reduction"] = name(job.config.effective_reduction());
  object["depth"] = job.config.depth;
  object["wire"] = name(job.config.dispatch_wire);
  object["combine_wire"] = name(job.config.combine_wire);
  object["router"] = router_text(job.model);
  object["replicas"] = job.replicas;
  object["replicated"] = job.config.replicated;
  object["skew"] = job.routing.skew;
  object["seed"] = job.routing.seed;
  object["steps"] = job.steps;
  object["kernels"] = outcome.kernels;
  object["fabric"] = outcome.fabric;
  object["experts_by"] = outcome.experts_by;
  object["verified"] = outcome.verified;
  object["verified_tokens"] = outcome.verified_tokens;
  object["max_error"] = outcome.max_error;
  object["tolerance"] = outcome.tolerance;
  object["rows_received"] = outcome.rows_received;
  object["loads"] = std::span(outcome.loads, static_cast<std::size_t>(job.model.experts));
  object["rank_loads"] = std::span(outcome.rank_rows, static_cast<std::size_t>(job.launch.ranks));
  object["imbalance"] = outcome.imbalance;
  if (job.replicas > 0) object["imbalance_before"] = outcome.imbalance_before;
  object["plan_us"] = to_json(outcome.plan);
  object["dispatch_us"] = to_json(outcome.dispatch);
  object["experts_us"] = to_json(outcome.experts);
  object["combine_us"] = to_json(outcome.combine);
  if (outcome.counts_traffic) {
    object["bytes_sent"] = outcome.dispatch_bytes + outcome.combine_bytes;
    object["link_bytes"] = outcome.link_bytes;
  }
  object["window_bytes"] = outcome.window_bytes;
  object["weight_bytes"] = outcome.weight_bytes;
  print_json(object);
}

void print_layer_text(const LayerJob& job, const LayerOutcome& outcome) {
  std::string text = head_text(job, outcome) + "\n" + stages_text(outcome);
  text +=
      fmt::format("  times of the slowest of {} ranks, {} steps; rows and bytes of one step\n\n",
                  job.launch.ranks, job.steps);
  text += loads_text(job, outcome);
  if (outcome.verified) {
    text += fmt::format("verified {} of {} tokens: max error {:.3g} <= tolerance {:.3g}\n",
                        outcome.verified_tokens, job.global_tokens(), outcome.max_error,
                        outcome.tolerance);
  }
  print_text(text);
}

}  // namespace wherry::cli
