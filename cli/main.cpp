// wherry: reads the command line, runs one subcommand, and turns whatever goes wrong into one
// sentence on stderr and an exit code.
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cstdio>
#include <new>
#include <string>

#include "command.hpp"
#include "report/output.hpp"
#include "support/build_info.hpp"
#include "wherry/error.hpp"

namespace wherry::cli {
namespace {

// A closed standard stream would give its number to the next file that is opened, a window for
// example, and the output would be written into that. Read-only, so that writes still fail.
void hold_standard_streams() {
  for (int fd = 0; fd <= 2; ++fd) {
    if (fcntl(fd, F_GETFD) == -1 && open("/dev/null", O_RDONLY) != fd) _exit(kFailed);
  }
}

int complain(int code, std::string sentence) {
  while (!sentence.empty() && sentence.back() == '\n') sentence.pop_back();
  const bool prefixed = sentence.starts_with("wherry");
  fmt::print(stderr, "{}{}\n", prefixed ? "" : "wherry: ", sentence);
  return code;
}

int exit_code(const Error& error) {
  switch (error.remedy()) {
    case Remedy::fix_the_call: return kBadUse;
    case Remedy::rebuild_the_exchange:
      return error.code() == ErrorCode::out_of_memory || error.code() == ErrorCode::interrupted
                 ? kBadUse
                 : kFailed;
    case Remedy::replace_the_peer:
    case Remedy::bug_in_wherry: return kFailed;
  }
  return kFailed;
}

std::string subcommands(const CLI::App& app) {
  std::string names;
  for (const CLI::App* command : app.get_subcommands({})) {
    names += (names.empty() ? "" : ", ") + command->get_name();
  }
  return names;
}

// The second half of the sentence about an argument that nothing expects.
std::string what_is_expected(const CLI::App& app) {
  const auto chosen = app.get_subcommands();
  if (chosen.empty()) return fmt::format("; the commands are: {}", subcommands(app));
  const std::string command = chosen.front()->get_name();
  return app.remaining().empty()
             ? fmt::format("; `wherry {} --help` lists what is allowed", command)
             : fmt::format("; options of a command come after it: wherry {} ...", command);
}

int run(int argc, char** argv) {
  CLI::App app("Dispatch and combine for Mixture-of-Experts layers.", "wherry");
  app.set_version_flag(
      "--version", fmt::format("wherry {} ({})", build_info::kVersion, build_info::git_commit()));
  Run command;
  add_info(app, command);
  add_layer(app, command);
  add_bench(app, command);
  add_balance(app, command);

  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& asked) {  // --help, --version
    app.exit(asked);
    print_text("");  // CLI11 does not look whether its text could be written
    return kOk;
  } catch (const CLI::ExtrasError& error) {
    return complain(kBadUse, error.what() + what_is_expected(app));
  } catch (const CLI::ArgumentMismatch& error) {  // "--ranks: 1 required N missing"
    const std::string sentence = error.what();
    return complain(kBadUse, sentence.substr(0, sentence.find(':')) + " takes exactly one value");
  } catch (const CLI::ParseError& error) {
    return complain(kBadUse, error.what());
  }
  if (!command) {
    return complain(kBadUse, fmt::format("no command was given; the commands are: {} (`wherry "
                                         "--help` says more)",
                                         subcommands(app)));
  }
  return command();
}

int guarded_run(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const Error& error) {
    // What the user can fix needs no stage and rank: the message alone.
    const int code = exit_code(error);
    return complain(code, code == kBadUse ? error.message() : error.what());
  } catch (const std::bad_alloc&) {
    return complain(kBadUse, "out of memory; ask for fewer ranks, tokens or experts");
  } catch (const std::exception& error) {
    return complain(kFailed, error.what());
  }
}

}  // namespace
}  // namespace wherry::cli

int main(int argc, char** argv) {
  wherry::cli::hold_standard_streams();
  return wherry::cli::guarded_run(argc, argv);
}
