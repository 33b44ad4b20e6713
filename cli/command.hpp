// The subcommands of `wherry`. Each lives in its own file; to add one, declare it here and call it
// in main.cpp.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>

namespace wherry::cli {

enum ExitCode : int {
  kOk = 0,
  kFailed = 1,  // a check failed, a rank died, the output could not be written
  kBadUse = 2,  // fix the call, or ask for less; also when interrupted
};

// What is to be done once all arguments are read; returns an exit code. May throw Error.
using Run = std::function<int()>;

// Each adds its subcommand to `app`; if the user asked for it, parsing sets `run`.
void add_info(CLI::App& app, Run& run);
void add_layer(CLI::App& app, Run& run);
void add_bench(CLI::App& app, Run& run);
void add_balance(CLI::App& app, Run& run);

}  // namespace wherry::cli
