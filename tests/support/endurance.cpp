#include "support/endurance.hpp"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <random>
#include <thread>

#include "exchange/config.hpp"
#include "fabric/faulty/fabric.hpp"
#include "group/state.hpp"
#include "support/held.hpp"
#include "support/layer.hpp"
#include "support/shared.hpp"

namespace wherry::test {

namespace {

Group without(const Group& group, int victim) {
  std::vector<int> others;
  for (int rank = 0; rank < group.size(); ++rank) {
    if (rank != victim) others.push_back(rank);
  }
  return group.subgroup(others);
}

void run_a_layer(Group& group) {
  const Batch batch = make_batch(13, group.size(), 6, 2, 16, 91);
  run_and_verify<Bf16>(group, batch, config_for(batch));
}

// Where a victim is struck: during start-up, or before its n-th signal.
struct Place {
  bool at_start_up;
  std::uint64_t signal;
};

Place random_place(std::mt19937_64& random, int ranks) {
  // Two steps of plan, dispatch and combine.
  return {random() % 5 == 0, random() % static_cast<std::uint64_t>(2 * 3 * ranks)};
}

// Makes this rank do `strike` there.
void strike_at(Group& group, const ExchangeConfig& config, const Place& place,
               const std::function<void()>& strike) {
  if (place.at_start_up) return strike();
  FaultScript script;
  auto sent = std::make_shared<std::uint64_t>(0);
  script.before = [=](const SignalEvent&) {
    if ((*sent)++ == place.signal) strike();
    return true;
  };
  make_faulty(
      group,
      layout::make_window_layout(capacity_of(config, placement_of(config, group.size())).params),
      script);
}

// Steps until one fails; the rank that is blamed.
int run_until_failure(Group& group, const Batch& batch, const ExchangeConfig& config,
                      ErrorCode code) {
  try {
    Exchange exchange(group, config);
    for (int step = 0; step < 4; ++step) {
      expect_dense<Bf16>(exchange, batch, run_layer<Bf16>(exchange, batch));
    }
  } catch (const Error& error) {
    expect(error.code() == code, error.what());
    return error.peer();
  }
  return -1;
}

}  // namespace

std::string run_killed_rounds(std::int64_t rounds, std::uint64_t seed, const Tell& tell) {
  constexpr int kRanks = 4;
  const Batch batch = make_batch(24, kRanks, 8, 2, 16, 92);
  ExchangeConfig config = config_for(batch);
  config.deadline = Seconds(20);
  std::mt19937_64 random(seed);
  const Shared<std::array<std::atomic<std::int64_t>, kRanks>> went_on;
  Held before;
  for (std::int64_t round = 0; round < rounds; ++round) {
    const int victim = static_cast<int>(random() % kRanks);
    const Place place = random_place(random, kRanks);
    bool ended = false;
    try {
      run_processes(kRanks, [&](Group& group) {
        if (group.rank() == victim) {
          strike_at(group, config, place, [] { raise(SIGKILL); });
        }
        const int blamed = run_until_failure(group, batch, config, ErrorCode::peer_failed);
        expect(blamed == victim, fmt::format("rank {} is blamed", blamed));
        Group rest = without(group, victim);
        run_a_layer(rest);
        ++(*went_on)[static_cast<std::size_t>(group.rank())];
      });
    } catch (const Error& error) {
      ended = error.code() == ErrorCode::peer_failed;
      expect(ended, fmt::format("round {}: {}", round, error.what()));
    }
    expect(ended, fmt::format("round {}: nobody missed rank {}", round, victim));
    std::int64_t sum = 0;
    for (const auto& count : *went_on) sum += count;
    expect(sum == (round + 1) * (kRanks - 1),
           fmt::format("round {}: {} of {} survivors went on; rank {} was struck {}", round,
                       sum - round * (kRanks - 1), kRanks - 1, victim,
                       place.at_start_up ? std::string("at start-up")
                                         : fmt::format("before signal {}", place.signal)));
    expect(waitpid(-1, nullptr, WNOHANG) == -1 && errno == ECHILD, "a process is left");
    if (round == 2) before = held();
    tell(round + 1);
  }
  const Held after = held();
  if (rounds > 3) expect_not_grown(before, after);
  return fmt::format("{} rounds with a killed rank: {}", rounds, growth(before, after));
}

std::string run_late_rounds(std::int64_t rounds, std::uint64_t seed, const Tell& tell) {
  constexpr int kRanks = 3;
  static constexpr Seconds kDeadline{0.1};
  const Batch batch = make_batch(12, kRanks, 6, 2, 16, 93);
  ExchangeConfig config = config_for(batch);
  config.deadline = kDeadline;
  const Shared<std::array<std::pair<Held, Held>, kRanks>> holdings;
  run_processes(kRanks, [&](Group& world) {
    std::mt19937_64 random(seed);  // all ranks draw alike
    auto& [before, after] = (*holdings)[static_cast<std::size_t>(world.rank())];
    const std::vector<int> everybody{0, 1, 2};
    for (std::int64_t round = 0; round < rounds; ++round) {
      const int victim = static_cast<int>(random() % kRanks);
      Place place = random_place(random, kRanks);
      place.at_start_up = false;  // all have come: they meet first
      {
        Group group = world.subgroup(everybody);
        if (group.rank() == victim) {
          strike_at(group, config, place, [] { std::this_thread::sleep_for(3 * kDeadline); });
        }
        const int blamed = run_until_failure(group, batch, config, ErrorCode::timeout);
        expect(blamed == victim,
               fmt::format("round {}: rank {} is blamed, rank {} was late", round, blamed, victim));
      }
      if (world.rank() != victim) {
        Group rest = without(world, victim);
        run_a_layer(rest);
      }
      if (round == 4) before = held();
      if (world.rank() == 0) tell(round + 1);
    }
    after = held();
    if (rounds > 5) expect_not_grown(before, after);
  });
  std::string all = fmt::format("{} rounds with a late rank:", rounds);
  for (const auto& [before, after] : *holdings) all += " [" + growth(before, after) + "]";
  return all;
}

std::string run_decode_steps(std::int64_t steps, const Tell& tell) {
  constexpr int kRanks = 2;
  constexpr int kRoutings = 5;
  const Batch batch = make_batch(7, kRanks, 6, 2, 32, 94);
  ExchangeConfig config = config_for(batch);
  config.layout = Layout::slots;
  config.depth = 2;
  const Shared<std::array<std::pair<Held, Held>, kRanks>> holdings;
  run_processes(kRanks, [&](Group& group) {
    Exchange exchange(group, config);
    Plan plan = exchange.make_plan();
    std::vector<Bf16> x = tokens_of<Bf16>(batch, group.rank());
    std::vector<Bf16> out(x.size());
    std::vector<std::vector<Bf16>> want;
    std::vector<Batch> routings;
    for (int i = 0; i < kRoutings; ++i) {
      Batch& now = routings.emplace_back(batch);
      for (std::int32_t& id : now.ids) id = (id + i) % now.experts;
      want.push_back(run_layer<Bf16>(exchange, now));
      expect_dense<Bf16>(exchange, now, want.back());
    }
    auto& [before, after] = (*holdings)[static_cast<std::size_t>(group.rank())];
    for (std::int64_t step = 0; step < steps; ++step) {
      const auto which = static_cast<std::size_t>(step % kRoutings);
      exchange.plan(routings[which].routing_of(group.rank()), plan);
      const Received received = exchange.dispatch(plan, view(x, batch.hidden));
      const TensorView y = exchange.combine_input(plan);
      apply_experts<Bf16>(exchange, received, y);
      exchange.combine(plan, y, view(out, batch.hidden));
      expect(
          std::ranges::equal(std::as_bytes(std::span(out)), std::as_bytes(std::span(want[which]))),
          fmt::format("rank {}, step {}: other bits", group.rank(), step));
      if (step == steps / 10) before = held();
      if (group.rank() == 0 && step % 1000 == 999) tell(step + 1);
    }
    after = held();
    expect_not_grown(before, after);
    expect(!kOwnAllocator || after.resident_kib <= before.resident_kib + 64, growth(before, after));
  });
  std::string all = fmt::format("{} decode steps, each the same bits as its first:", steps);
  for (const auto& [before, after] : *holdings) all += " [" + growth(before, after) + "]";
  return all;
}

}  // namespace wherry::test
