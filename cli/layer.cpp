// wherry layer: a whole Mixture-of-Experts layer over N ranks of this machine, verified.
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "command.hpp"
#include "experts/expert_hidden.hpp"
#include "gather.hpp"
#include "layer/job.hpp"
#include "options.hpp"
#include "progress.hpp"
#include "report/table.hpp"
#include "support/check.hpp"

namespace wherry::cli {
namespace {

struct LayerOptions {
  LaunchOptions launch;
  ShapeOptions shape;
  ExchangeOptions exchange;
  RoutingOptions routing;
  std::optional<int> expert_hidden;
  int replicas = 0;
  int replicated = 1;
  int steps = 5;
  bool json = false;
};

// Bytes that a run takes beside its weights: windows, tokens and results, one expert a rank that is
// not packed yet, and with formats on the way once more as much as the windows, for rows as they are.
std::uint64_t bytes_beside_weights(const LayerJob& job, std::int64_t expert_hidden) {
  const auto ranks = static_cast<std::uint64_t>(job.launch.ranks);
  const auto rows = static_cast<std::uint64_t>(2 * job.tokens * job.model.hidden);
  const bool converts =
      job.config.dispatch_wire != Wire::same || job.config.combine_wire != Wire::same;
  return ranks * (job.config.window_bytes(job.launch.ranks) * (converts ? 2 : 1) + rows * 2 +
                  expert_weight_bytes(1, job.model.hidden, expert_hidden, job.config.dtype));
}

std::uint64_t bytes_of(const LayerJob& job, std::int64_t expert_hidden) {
  return bytes_beside_weights(job, expert_hidden) +
         expert_weight_bytes(job.model.experts + job.replicas, job.model.hidden, expert_hidden,
                             job.config.dtype);
}

// Throws out_of_memory, saying what would fit, before anything is allocated: a machine that runs out
// kills a rank without a sentence. A twentieth stays free for what is not counted here.
void check_memory(const LayerJob& job, std::uint64_t available) {
  const std::uint64_t usable = available - available / 20;
  const std::uint64_t needed = bytes_of(job, job.model.expert_hidden);
  if (needed <= usable) return;
  std::int64_t fits = 1;
  while (bytes_of(job, fits * 2) <= usable) fits *= 2;
  const std::string allowed = bytes_of(job, fits) <= usable
                                  ? fmt::format("--expert-hidden {} would fit", fits)
                                  : "choose fewer --tokens, --experts or --ranks";
  const auto text = [](std::uint64_t bytes) { return bytes_text(static_cast<double>(bytes)); };
  throw Error(ErrorCode::out_of_memory, {Stage::startup, -1, -1},
              fmt::format("no memory: the weights of {} experts with --expert-hidden {} and the "
                          "windows of {} ranks need {}, and {} of the {} available may be used; {}",
                          job.model.experts, job.model.expert_hidden, job.launch.ranks,
                          text(needed), text(usable), text(available), allowed));
}

// Every rank as many slots; which experts the replicas are of is decided by load.
Placement spread(const LayerJob& job) {
  const int slots = job.model.experts + job.replicas;
  const int ranks = job.launch.ranks;
  const int missing = (ranks - slots % ranks) % ranks;
  WHERRY_CHECK_ARGUMENT(slots % ranks == 0, Stage::placement,
                        "--replicas {} makes {} slots of {} experts, which {} ranks cannot share "
                        "evenly; --replicas {} would do",
                        job.replicas, slots, job.model.experts, ranks, job.replicas + missing);
  std::vector<int> slot_to_expert, slot_begin;
  for (int slot = 0; slot < slots; ++slot) slot_to_expert.push_back(slot % job.model.experts);
  for (int rank = 0; rank <= ranks; ++rank) slot_begin.push_back(slots / ranks * rank);
  return Placement::from_slots(job.model.experts, std::move(slot_to_expert), std::move(slot_begin));
}

LayerJob settle(const LayerOptions& options) {
  LayerJob job{.launch = options.launch,
               .routing = options.routing,
               .model = options.shape.resolve(),
               .expert_hidden_sentence = {},
               .tokens = options.shape.tokens,
               .replicas = options.replicas,
               .steps = options.steps,
               .config = {}};
  job.config = options.exchange.config(job.model, job.tokens, options.launch);
  WHERRY_CHECK_ARGUMENT(job.launch.ranks % options.replicated == 0, Stage::startup,
                        "--replicated is {}; it must divide the {} ranks", options.replicated,
                        job.launch.ranks);
  job.config.replicated = options.replicated;
  job.config.num_threads = threads_per_rank(job.launch.ranks);
  if (job.replicas > 0) job.config.placement = spread(job);
  const std::uint64_t available = available_memory();
  if (options.expert_hidden) {
    job.model.expert_hidden = *options.expert_hidden;
  } else {
    const ExpertHidden chosen = default_expert_hidden(job.model, job.config.dtype, available);
    job.model.expert_hidden = static_cast<int>(chosen.value);
    job.expert_hidden_sentence = chosen.sentence;
  }
  // Of a GPU's memory only its ranks may ask: CUDA does not survive their fork.
  if (job.launch.device == Device::Kind::cpu) check_memory(job, available);
  return job;
}

int run_layer(const LayerOptions& options) {
  const LayerJob job = settle(options);
  const Shared<LayerOutcome> outcome;
  try {
    launch(job.launch, [&](Group& group) { run_layer_rank(group, job, *outcome); });
  } catch (...) {
    clear_progress();
    throw;
  }
  if (options.json) {
    print_layer_json(job, *outcome);
  } else {
    print_layer_text(job, *outcome);
  }
  if (outcome->verified) return kOk;
  fmt::print(stderr,
             "wherry: the result is wrong: token {}, column {} is {:.3g} away from the dense "
             "reference, and {:.3g} is allowed\n",
             outcome->worst_token, outcome->worst_column, outcome->max_error, outcome->tolerance);
  return kFailed;
}

}  // namespace

void add_layer(CLI::App& app, Run& run) {
  CLI::App* command = app.add_subcommand(
      "layer", "Run a whole MoE layer over N ranks and verify it against a dense reference");
  const auto options = std::make_shared<LayerOptions>();
  add_launch_options(*command, options->launch);
  add_device_option(*command, options->launch);
  add_shape_options(*command, options->shape);
  command
      ->add_option("--expert-hidden", options->expert_hidden,
                   "Width of the expert MLPs [the largest power of two that takes at most 4 GB and "
                   "half of the available memory]")
      ->check(whole_number(1, 1 << 20))
      ->type_name("N");
  add_exchange_options(*command, options->exchange);
  command
      ->add_option("--replicas", options->replicas,
                   "Slots beyond one an expert; they and all experts are placed by load")
      ->check(whole_number(0, 1 << 16))
      ->type_name("N")
      ->capture_default_str();
  command
      ->add_option("--replicated", options->replicated,
                   "Ranks that hold the same tokens, as attention under tensor parallelism leaves "
                   "them; each sends its share")
      ->check(whole_number(1, kMostRanks))
      ->type_name("N")
      ->capture_default_str();
  add_routing_options(*command, options->routing);
  command->add_option("--steps", options->steps, "Timed repetitions")
      ->check(whole_number(1, 100000))
      ->type_name("N")
      ->capture_default_str();
  command->add_flag("--json", options->json, "One JSON object on stdout, and nothing else");
  command->callback([&run, options] { run = [options] { return run_layer(*options); }; });
}

}  // namespace wherry::cli
