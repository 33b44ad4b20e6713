// make soak: the long runs at full length, with a seed of one's own.
#include <fmt/chrono.h>
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <functional>
#include <string>

#include "progress.hpp"
#include "support/endurance.hpp"
#include "support/held.hpp"
#include "support/random_case.hpp"

namespace wherry::test {
namespace {

struct Wanted {
  std::uint64_t seed = 1;
  std::int64_t configs = 10'000, killed = 1000, late = 1000, decode = 1'000'000;
};

std::string run_configs(std::int64_t count, std::uint64_t seed, const Tell& tell) {
  Held before;
  for (std::int64_t i = 0; i < count; ++i) {
    if (i == count / 10) before = held();
    const RandomCase random = random_case(seed * 1'000'000 + static_cast<std::uint64_t>(i));
    try {
      run_case(random);
    } catch (const std::exception& error) {
      throw std::runtime_error(fmt::format("{}\n  {}", error.what(), random.text()));
    }
    tell(i + 1);
  }
  const Held after = held();
  expect_not_grown(before, after);
  return fmt::format("{} random configurations, every output verified: {}", count,
                     growth(before, after));
}

// Runs one of them unless it is not wanted; false if it failed.
bool run(const char* what, std::int64_t count,
         const std::function<std::string(const Tell&)>& body) {
  if (count == 0) return true;
  const auto start = std::chrono::steady_clock::now();
  std::string end;
  bool good = true;
  {
    cli::Progress progress(true);
    try {
      end = body(
          [&](std::int64_t done) { progress.tick(fmt::format("{} {} of {}", what, done, count)); });
    } catch (const std::exception& error) {
      good = false;
      end = error.what();
    }
  }
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  fmt::print("{} {}: {} ({:.0f} s)\n", good ? "passed" : "FAILED", what, end, took.count());
  std::fflush(stdout);
  return good;
}

int run_all(const Wanted& w) {
  bool good = run("configs", w.configs,
                  [&](const Tell& tell) { return run_configs(w.configs, w.seed, tell); });
  good = run("killed", w.killed,
             [&](const Tell& tell) { return run_killed_rounds(w.killed, w.seed, tell); }) &&
         good;
  good = run("late", w.late,
             [&](const Tell& tell) { return run_late_rounds(w.late, w.seed, tell); }) &&
         good;
  good =
      run("decode", w.decode, [&](const Tell& tell) { return run_decode_steps(w.decode, tell); }) &&
      good;
  return good ? 0 : 1;
}

}  // namespace
}  // namespace wherry::test

int main(int argc, char** argv) {
  wherry::test::Wanted wanted;
  CLI::App app(
      "Runs Wherry for a long time: random configurations, ranks that fail, decode steps.");
  app.add_option("--seed", wanted.seed, "other seeds draw other cases")->capture_default_str();
  const CLI::Range whole(std::int64_t{0}, std::int64_t{1} << 40, "0 to 2^40");
  const auto count = [&](const char* name, std::int64_t& value, const char* what) {
    app.add_option(name, value, what)->check(whole)->capture_default_str();
  };
  count("--configs", wanted.configs, "random configurations, each verified; 0: none");
  count("--killed", wanted.killed, "rounds in which a rank is killed and the others go on");
  count("--late", wanted.late, "rounds in which a rank is late, in the same processes");
  count("--decode", wanted.decode, "decode steps through one exchange");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  return wherry::test::run_all(wanted);
}
