// wherry balance: loads of the experts in a file -> where to put them, and which weights to move.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "command.hpp"
#include "options.hpp"
#include "report/output.hpp"
#include "report/table.hpp"
#include "support/check.hpp"
#include "wherry/placement.hpp"

namespace wherry::cli {
namespace {

struct BalanceOptions {
  std::string loads_file;
  std::string from_file;
  BalanceConfig config;
  std::optional<int> slots = std::nullopt;
  bool json = false;
};

using Loads = std::vector<std::vector<double>>;

struct Outcome {
  std::vector<Placement> from;
  std::vector<double> imbalance_before;
  std::vector<BalancedLayer> layers;
  std::vector<std::vector<Move>> moves;
};

// --- What is read ---------------------------------------------------------------------------------

std::string read_text(const std::string& path) {
  const auto close = [](FILE* file) { std::fclose(file); };
  const std::unique_ptr<FILE, decltype(close)> file(std::fopen(path.c_str(), "rb"), close);
  std::string text;
  std::array<char, 1 << 16> part;
  for (std::size_t size = 1; file && size > 0;) {
    size = std::fread(part.data(), 1, part.size(), file.get());
    text.append(part.data(), size);
  }
  WHERRY_CHECK_ARGUMENT(file && std::ferror(file.get()) == 0, Stage::placement,
                        "cannot read {}: {}", path, std::strerror(errno));
  return text;
}

Json read_json(const std::string& path) {
  const std::string text = read_text(path);
  try {
    return Json::parse(text);
  } catch (const Json::exception& error) {
    const std::string what = error.what();
    const std::size_t prefix = what.find("] ");
    throw Error(ErrorCode::bad_argument, {Stage::placement, -1, -1},
                fmt::format("{} is not JSON: {}", path,
                            prefix == std::string::npos ? what : what.substr(prefix + 2)));
  }
}

// object[key] as rows of numbers, one row a layer.
const Json& rows_of(const Json& object, const char* key, const std::string& path) {
  WHERRY_CHECK_ARGUMENT(
      object.is_object() && object.contains(key) && object[key].is_array(), Stage::placement,
      "{} must be {{\"{}\": [[...], ...]}}, one row of numbers a layer", path, key);
  const Json& rows = object[key];
  for (std::size_t layer = 0; layer < rows.size(); ++layer) {
    WHERRY_CHECK_ARGUMENT(rows[layer].is_array(), Stage::placement,
                          "{}: {}[{}] is {}; it must be a row of numbers", path, key, layer,
                          rows[layer].type_name());
  }
  return rows;
}

Loads read_loads(const std::string& path) {
  const Json object = read_json(path);
  Loads loads;
  for (const Json& row : rows_of(object, "loads", path)) {
    std::vector<double>& layer = loads.emplace_back();
    for (const Json& load : row) {
      WHERRY_CHECK_ARGUMENT(load.is_number(), Stage::placement,
                            "{}: loads[{}][{}] is {}; it must be a number", path, loads.size() - 1,
                            layer.size(), load.dump());
      layer.push_back(load.get<double>());
    }
  }
  return loads;
}

// Placements as this command writes them.
std::vector<Placement> read_placements(const std::string& path, int experts, int ranks) {
  const Json object = read_json(path);
  std::vector<Placement> placements;
  for (const Json& row : rows_of(object, "physical_to_logical", path)) {
    const std::size_t layer = placements.size();
    std::vector<int> slots;
    for (const Json& expert : row) {
      WHERRY_CHECK_ARGUMENT(expert.is_number_integer() && expert >= -1 && expert < experts,
                            Stage::placement,
                            "{}: physical_to_logical[{}][{}] is {}; experts are 0..{}, and -1 is "
                            "an empty slot",
                            path, layer, slots.size(), expert.dump(), experts - 1);
      slots.push_back(expert.get<int>());
    }
    const auto num_ranks = static_cast<std::size_t>(ranks);
    WHERRY_CHECK_ARGUMENT(slots.size() % num_ranks == 0, Stage::placement,
                          "{}: layer {} has {} slots; it must be a multiple of --ranks {}", path,
                          layer, slots.size(), ranks);
    std::vector<int> begin;
    for (std::size_t r = 0; r <= num_ranks; ++r)
      begin.push_back(static_cast<int>(r * (slots.size() / num_ranks)));
    try {
      placements.push_back(Placement::from_slots(experts, std::move(slots), std::move(begin)));
    } catch (const Error& error) {
      throw Error(error.code(), {error.stage(), -1, -1},
                  fmt::format("{}: layer {}: {}", path, layer, error.message()));
    }
  }
  return placements;
}

// --- What is done ---------------------------------------------------------------------------------

int experts_of(const Loads& loads) { return loads.empty() ? 0 : static_cast<int>(loads[0].size()); }

Outcome balance_loads(const Loads& loads, const BalanceOptions& options) {
  const BalanceConfig& config = options.config;
  Outcome outcome;
  if (!options.from_file.empty()) {
    outcome.from = read_placements(options.from_file, experts_of(loads), config.ranks);
    WHERRY_CHECK_ARGUMENT(outcome.from.size() == loads.size(), Stage::placement,
                          "{} has {} layers and {} has {}; they must be the same",
                          options.from_file, outcome.from.size(), options.loads_file, loads.size());
  } else if (experts_of(loads) > 0) {
    outcome.from.assign(loads.size(), Placement::contiguous(experts_of(loads), config.ranks));
  }
  outcome.layers = balance(loads, config, outcome.from);
  const int nodes = config.ranks % config.nodes == 0 ? config.nodes : 1;
  for (std::size_t layer = 0; layer < loads.size(); ++layer) {
    outcome.imbalance_before.push_back(imbalance(rank_loads(outcome.from[layer], loads[layer])));
    outcome.moves.push_back(moves(outcome.from[layer], outcome.layers[layer].placement(), nodes));
  }
  return outcome;
}

// --- What is printed ------------------------------------------------------------------------------

bool keeps_groups(const BalanceConfig& config) {
  return config.nodes > 1 && config.groups % config.nodes == 0;
}

Json as_json(const BalanceOptions& options, const Outcome& outcome) {
  Json object = json_for("balance");
  object["ranks"] = options.config.ranks;
  object["nodes"] = options.config.nodes;
  object["slots"] = options.config.slots;
  object["groups"] = options.config.groups;
  object["groups_stay_on_a_node"] = keeps_groups(options.config);
  object["policy"] = name(options.config.policy);
  object["from"] = options.from_file.empty() ? "contiguous" : options.from_file;
  object["imbalance_before"] = outcome.imbalance_before;
  for (const char* table :
       {"imbalance", "physical_to_logical", "logical_to_physical", "replicas", "rank_loads"})
    object[table] = Json::array();
  for (const BalancedLayer& layer : outcome.layers) {
    object["imbalance"].push_back(layer.imbalance);
    object["physical_to_logical"].push_back(layer.physical_to_logical);
    object["logical_to_physical"].push_back(layer.logical_to_physical);
    object["replicas"].push_back(layer.replicas);
    object["rank_loads"].push_back(layer.rank_loads);
  }
  object["moves"] = Json::array();
  for (const std::vector<Move>& layer : outcome.moves) {
    Json list = Json::array();
    for (const Move& move : layer) {
      list.push_back({{"expert", move.expert},
                      {"from_slot", move.from_slot},
                      {"to_slot", move.to_slot},
                      {"from_rank", move.from_rank},
                      {"to_rank", move.to_rank}});
    }
    object["moves"].push_back(std::move(list));
  }
  return object;
}

std::string as_text(const BalanceOptions& options, const Outcome& outcome) {
  using enum Table::Align;
  const BalanceConfig& config = options.config;
  std::string text = fmt::format(
      "{} experts in {} slots of {} ranks; policy {}{}\n", outcome.layers[0].replicas.size(),
      config.slots, config.ranks, name(config.policy),
      keeps_groups(config)
          ? fmt::format("; each of {} groups on one of {} nodes", config.groups, config.nodes)
          : "");
  text += fmt::format("before: {}\n\n", options.from_file.empty() ? "contiguous, one slot an expert"
                                                                  : options.from_file);
  Table table({{"layer", right},
               {"max/mean before", right},
               {"after", right},
               {"most replicas", right},
               {"weights that travel", right},
               {"copies inside a rank", right}});
  for (std::size_t i = 0; i < outcome.layers.size(); ++i) {
    const BalancedLayer& layer = outcome.layers[i];
    const std::vector<Move>& list = outcome.moves[i];
    const auto travel = std::ranges::count_if(list, &Move::travels);
    table.add({std::to_string(i), fmt::format("{:.4f}", outcome.imbalance_before[i]),
               fmt::format("{:.4f}", layer.imbalance),
               std::to_string(*std::max_element(layer.replicas.begin(), layer.replicas.end())),
               count_text(travel), count_text(static_cast<std::int64_t>(list.size()) - travel)});
  }
  return text + table.to_string(2);
}

int run_balance(BalanceOptions options) {
  const Loads loads = read_loads(options.loads_file);
  const int ranks = options.config.ranks;
  // The fewest that fit, unless the user says how many.
  options.config.slots = options.slots.value_or((experts_of(loads) + ranks - 1) / ranks * ranks);
  const Outcome outcome = balance_loads(loads, options);
  if (options.json) {
    print_json(as_json(options, outcome));
  } else {
    print_text(as_text(options, outcome));
  }
  return kOk;
}

}  // namespace

void add_balance(CLI::App& app, Run& run) {
  CLI::App* command =
      app.add_subcommand("balance", "Place experts by their loads, with replicas, and list moves");
  const auto options = std::make_shared<BalanceOptions>();
  BalanceConfig& config = options->config;
  command
      ->add_option("--loads", options->loads_file,
                   "JSON {\"loads\": [[...], ...]}: a row a layer, a number an expert")
      ->type_name("FILE")
      ->required();
  constexpr int kMost = 1 << 16;
  command->add_option("--ranks", config.ranks, "Ranks that hold the experts")
      ->check(whole_number(1, kMost))
      ->type_name("N")
      ->required();
  command->add_option("--nodes", config.nodes, "Nodes that hold the ranks")
      ->check(whole_number(1, kMost))
      ->type_name("N")
      ->capture_default_str();
  command
      ->add_option("--slots", options->slots,
                   "Places for experts, all ranks together [the fewest that fit]")
      ->check(whole_number(1, kMost))
      ->type_name("N");
  command
      ->add_option("--groups", config.groups,
                   "Groups of experts; a multiple of --nodes keeps each on one node")
      ->check(whole_number(1, kMost))
      ->type_name("N")
      ->capture_default_str();
  add_choice(*command, "--policy", config.policy, {BalancePolicy::best, BalancePolicy::reference},
             "Ours, or DeepSeek's EPLB [best]");
  command
      ->add_option("--from", options->from_file,
                   "JSON with physical_to_logical, as --json prints it: where the experts are now "
                   "[contiguous, one slot an expert]")
      ->type_name("FILE");
  command->add_flag("--json", options->json, "One JSON object on stdout, and nothing else");
  command->callback([&run, options] { run = [options] { return run_balance(*options); }; });
}

}  // namespace wherry::cli
