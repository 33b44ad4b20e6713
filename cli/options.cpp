#include "options.hpp"

#include <fmt/format.h>

#include <charconv>

#include "kernels/stages.hpp"
#include "support/check.hpp"

namespace wherry::cli {

namespace {

// nullopt unless all of `text` is one number.
template <typename Number>
std::optional<Number> parse(const std::string& text) {
  Number value{};
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || stop != end) return std::nullopt;
  return value;
}

}  // namespace

CLI::Validator whole_number(std::int64_t least, std::int64_t most) {
  const auto check = [least, most](const std::string& text) {
    const auto value = parse<std::int64_t>(text);
    if (value && *value >= least && *value <= most) return std::string();
    return fmt::format("'{}' is not a whole number from {} to {}", text, least, most);
  };
  return {check, ""};
}

CLI::Validator number(double least, double most) {
  const auto check = [least, most](const std::string& text) {
    const auto value = parse<double>(text);
    if (value && *value >= least && *value <= most) return std::string();
    return fmt::format("'{}' is not a number from {:g} to {:g}", text, least, most);
  };
  return {check, ""};
}

void add_launch_options(CLI::App& app, LaunchOptions& options) {
  app.add_option("--ranks", options.ranks, "Ranks to start on this machine")
      ->check(whole_number(1, 1024))
      ->type_name("N")
      ->capture_default_str();
  CLI::Option* threads =
      app.add_flag("--threads", options.threads, "Ranks are threads of one process");
  app.add_flag("--processes")->description("Ranks are processes (the default)")->excludes(threads);
  app.add_option("--deadline", options.deadline, "Longest wait for another rank, in seconds")
      ->check(number(0.001, 1e6))
      ->type_name("S")
      ->capture_default_str();
}

void add_device_option(CLI::App& app, LaunchOptions& options) {
  add_choice(app, "--device", options.device, {Device::Kind::cpu, Device::Kind::cuda},
             "Where rows, kernels and experts are; on cuda ranks take the GPUs in turn")
      ->default_str("cpu");
}

void add_shape_options(CLI::App& app, ShapeOptions& options) {
  app.add_option("--model", options.model, "Shape of a public model; `wherry info` lists them")
      ->type_name("NAME")
      ->capture_default_str();
  app.add_option("--tokens", options.tokens, "Tokens of each rank")
      ->check(whole_number(1, 1 << 24))
      ->type_name("N")
      ->capture_default_str();
  app.add_option("--hidden", options.hidden, "Elements of a token, instead of the model's")
      ->check(whole_number(1, 1 << 20))
      ->type_name("N");
  app.add_option("--topk", options.topk, "Experts a token visits, instead of the model's")
      ->check(whole_number(1, kernels::kMaxTopk))
      ->type_name("N");
  app.add_option("--experts", options.experts, "Routed experts, instead of the model's")
      ->check(whole_number(1, 1 << 16))
      ->type_name("N");
}

Model ShapeOptions::resolve() const {
  Model shape = find_model(model);
  shape.hidden = hidden.value_or(shape.hidden);
  shape.topk = topk.value_or(shape.topk);
  shape.experts = experts.value_or(shape.experts);
  WHERRY_CHECK_ARGUMENT(shape.topk <= shape.experts, Stage::none,
                        "--topk {} is larger than --experts {}: a token visits an expert at most "
                        "once, so --topk may be 1 to {}",
                        shape.topk, shape.experts, shape.experts);
  // What the router of the model has no meaning for in another shape is left out.
  const int group_size = shape.experts / shape.groups;
  if (shape.experts % shape.groups != 0 || shape.topk > group_size * shape.groups_kept) {
    shape.groups = shape.groups_kept = 1;
  }
  shape.weight_on_input = shape.weight_on_input && shape.topk == 1;
  return shape;
}

void add_exchange_options(CLI::App& app, ExchangeOptions& options) {
  using enum Layout;
  using enum Reduction;
  add_choice(app, "--layout", options.layout, {grouped, tokens, slots},
             "How received rows lie in memory")
      ->default_str("grouped");
  add_choice(app, "--reduction", options.reduction, {by_token, by_rank},
             "What goes home, and in which order it is summed [by_token for slots, else by_rank]");
  add_choice(app, "--wire", options.wire, all_wires(),
             "Number format of rows to the experts; `wherry info` lists them")
      ->type_name("WIRE")
      ->default_str("same");
  add_choice(app, "--combine-wire", options.combine_wire, all_wires(),
             "Number format of results on the way home")
      ->type_name("WIRE")
      ->default_str("same");
  app.add_option("--depth", options.depth, "Dispatches that may be in flight at once")
      ->check(whole_number(1, 16))
      ->type_name("N")
      ->capture_default_str();
  app.add_option("--kernels", options.kernels, "Kernel set; `wherry info` lists them [the best]")
      ->type_name("NAME");
}

ExchangeConfig ExchangeOptions::config(const Model& model, std::int64_t tokens,
                                       const LaunchOptions& launch) const {
  ExchangeConfig config;
  config.experts = model.experts;
  config.topk = model.topk;
  config.hidden = model.hidden;
  config.max_tokens = tokens;
  config.layout = layout;
  config.reduction = reduction;
  config.dispatch_wire = wire;
  config.combine_wire = combine_wire;
  config.depth = depth;
  config.deadline = Seconds(launch.deadline);
  // A wrong name is found before ranks start; on a GPU by the exchange.
  const bool on_cpu = launch.device == Device::Kind::cpu;
  config.kernels = on_cpu ? std::string(kernels::find(kernels).name) : kernels;
  return config;
}

void add_routing_options(CLI::App& app, RoutingOptions& options) {
  app.add_option("--skew", options.skew,
                 "Popularity of experts: 0 is uniform, else the exponent of a Zipf law")
      ->check(number(0.0, 10.0))
      ->type_name("X")
      ->capture_default_str();
  app.add_option("--seed", options.seed, "Of tokens, weights and routing")
      ->check(whole_number(0, std::numeric_limits<std::int64_t>::max()))
      ->type_name("N")
      ->capture_default_str();
}

}  // namespace wherry::cli
