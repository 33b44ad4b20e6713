// Flags that several commands share, and how a wrong value is answered: one sentence that says what
// is allowed. Each add_*_options() binds flags to a struct, which must live until parsing is over.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "launch.hpp"
#include "route/models.hpp"
#include "wherry/exchange.hpp"

namespace wherry::cli {

// Checks of one value; the message names the value and the range.
[[nodiscard]] CLI::Validator whole_number(std::int64_t least, std::int64_t most);
[[nodiscard]] CLI::Validator number(double least, double most);

// An option whose values are the names of an enum (by the library's name()). `Target` is the enum
// or a std::optional of it.
template <typename Enum, typename Target>
CLI::Option* add_choice(CLI::App& app, const std::string& flag, Target& target,
                        std::span<const Enum> allowed, const std::string& help) {
  std::string names;
  for (const Enum value : allowed) names += (names.empty() ? "" : "|") + std::string(name(value));
  const std::vector<Enum> values(allowed.begin(), allowed.end());
  const auto take = [&target, values](const std::string& text) {
    for (const Enum value : values) {
      if (name(value) == text) target = value;
    }
  };
  const auto check = [values, names](const std::string& text) {
    for (const Enum value : values) {
      if (name(value) == text) return std::string();
    }
    return "'" + text + "' is not one of " + names;
  };
  return app.add_option_function<std::string>(flag, take, help)->check(check, "")->type_name(names);
}
template <typename Enum, typename Target>
CLI::Option* add_choice(CLI::App& app, const std::string& flag, Target& target,
                        std::initializer_list<Enum> allowed, const std::string& help) {
  return add_choice(app, flag, target, std::span<const Enum>(allowed.begin(), allowed.size()),
                    help);
}

// --ranks, --threads | --processes, --deadline.
void add_launch_options(CLI::App& app, LaunchOptions& options);
// --device, for commands that run on GPUs too.
void add_device_option(CLI::App& app, LaunchOptions& options);

// --model, --tokens, --hidden, --topk, --experts: what the layer is. Flags change the model's shape.
struct ShapeOptions {
  std::string model = "deepseek-v3";
  std::int64_t tokens = 64;  // a rank
  std::optional<int> hidden = std::nullopt;
  std::optional<int> topk = std::nullopt;
  std::optional<int> experts = std::nullopt;

  // The model with what the flags change. Throws bad_argument: no such model, topk > experts.
  [[nodiscard]] Model resolve() const;
};
void add_shape_options(CLI::App& app, ShapeOptions& options);

// --layout, --reduction, --wire, --combine-wire, --depth, --kernels: how its tokens travel.
struct ExchangeOptions {
  Layout layout = Layout::grouped;
  std::optional<Reduction> reduction = std::nullopt;
  Wire wire = Wire::same;
  Wire combine_wire = Wire::same;
  int depth = 1;
  std::string kernels = {};

  // The configuration of an exchange of `tokens` tokens a rank, complete but for the threads.
  [[nodiscard]] ExchangeConfig config(const Model& model, std::int64_t tokens,
                                      const LaunchOptions& launch) const;
};
void add_exchange_options(CLI::App& app, ExchangeOptions& options);

// --skew, --seed: which experts the tokens choose.
struct RoutingOptions {
  double skew = 0.0;  // exponent of a Zipf law over the experts; 0: all equally likely
  std::uint64_t seed = 1;
};
void add_routing_options(CLI::App& app, RoutingOptions& options);

}  // namespace wherry::cli
