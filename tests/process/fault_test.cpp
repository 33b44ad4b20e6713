// Ranks as processes that are killed, stopped or late at every stage, or never start: survivors name
// the rank in time, and go on in a group of their own.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <thread>

#include "exchange/config.hpp"
#include "fabric/faulty/fabric.hpp"
#include "group/state.hpp"
#include "support/doorbell.hpp"
#include "support/layer.hpp"
#include "support/shared.hpp"

namespace wherry::test {
namespace {

using layout::Channel;
constexpr int kRanks = 4;
constexpr int kVictim = 2;
constexpr Seconds kDeadline{1.0};

constexpr int kLate = 0;  // in place of a signal: sleeps until the others have given up

enum class When { before_first, in_the_middle, after_last };

struct Case {
  Channel channel;
  When when;
  int signal;          // SIGKILL, SIGSTOP or kLate
  int late_rank = -1;  // enters its wait for the victim later than others wait for it
};

// What each survivor saw.
struct Report {
  std::atomic<int> finished;
  struct Rank {
    ErrorCode code;
    Stage stage;
    int peer;
    double seconds;  // from the fault to the error
    bool failed;
    bool went_on;  // with the other survivors
    char what[256];
  };
  std::array<Rank, kRanks> ranks;
  std::atomic<pid_t> victim;
  std::atomic<double> struck;  // when the victim was struck, seconds of the steady clock
};

double now() { return std::chrono::duration<double>(Clock::now().time_since_epoch()).count(); }

void strike(int signal, Report& report) {
  report.struck = now();
  if (signal == kLate) {
    std::this_thread::sleep_for(kDeadline + Seconds(1));
  } else {
    raise(signal);
  }
}

// A new exchange over the ranks that are left, in the same processes, and a layer through it.
void go_on(const Group& group, Report& report) {
  std::vector<int> survivors;
  for (int rank = 0; rank < group.size(); ++rank) {
    if (rank != kVictim) survivors.push_back(rank);
  }
  Group rest = group.subgroup(survivors);
  const Batch batch = make_batch(24, rest.size(), 8, 2, 16, 24);
  run_and_verify<Bf16>(rest, batch, config_for(batch));
  report.ranks[static_cast<std::size_t>(group.rank())].went_on = true;
}

// A stopped rank would stay for ever: the last survivor ends it.
void finish(int signal, Report& report) {
  if (++report.finished == kRanks - 1 && signal == SIGSTOP) kill(report.victim, SIGKILL);
}

FaultScript strike_at(const Case& c, Report& report) {
  // Step 3 of kRanks signals a step: signals 2*kRanks .. 3*kRanks-1 of the channel.
  constexpr std::uint64_t kFirst = 2 * kRanks;
  FaultScript script;
  if (c.when == When::after_last) {
    script.after = [=, &report](const SignalEvent& e) {
      if (e.channel == c.channel && e.ordinal == kFirst + kRanks - 1) strike(c.signal, report);
    };
  } else {
    script.before = [=, &report](const SignalEvent& e) {
      const std::uint64_t at = c.when == When::before_first ? kFirst : kFirst + kRanks / 2;
      if (e.channel == c.channel && e.ordinal == at) strike(c.signal, report);
      return true;
    };
  }
  return script;
}

void survive(Group& group, const Batch& batch, const ExchangeConfig& config, const Case& c,
             Report& report) {
  if (group.rank() == kVictim) {
    report.victim = getpid();
    const Placement placement = Placement::contiguous(config.experts, kRanks);
    const auto layout = layout::make_window_layout(capacity_of(config, placement).params);
    make_faulty(group, layout, strike_at(c, report));
  } else if (group.rank() == c.late_rank) {
    const Placement placement = Placement::contiguous(config.experts, kRanks);
    FaultScript script;
    script.after = [](const SignalEvent& e) {
      if (e.channel == Channel::dispatch && e.ordinal == 3 * kRanks - 1) {
        std::this_thread::sleep_for(std::chrono::milliseconds(600));
      }
    };
    make_faulty(group, layout::make_window_layout(capacity_of(config, placement).params), script);
  }
  Exchange exchange(group, config);
  Report::Rank& mine = report.ranks[static_cast<std::size_t>(group.rank())];
  try {
    for (int step = 0; step < 5; ++step) {
      expect_dense<Bf16>(exchange, batch, run_layer<Bf16>(exchange, batch));
    }
  } catch (const Error& error) {
    mine.seconds = now() - report.struck;
    mine.code = error.code();
    mine.stage = error.stage();
    mine.peer = error.peer();
    mine.failed = true;
    std::snprintf(mine.what, sizeof(mine.what), "%s", error.what());
    // Sticky: the same first cause, at once, from every later call.
    try {
      Plan plan = exchange.make_plan();
      exchange.plan(batch.routing_of(group.rank()), plan);
      mine.failed = false;
    } catch (const Error& again) {
      mine.failed = again.peer() == mine.peer && again.code() == mine.code;
    }
  }
  if (group.rank() == kVictim) return;  // it was late, and is told so
  go_on(group, report);
  finish(c.signal, report);
}

// Every survivor named the victim, in time, and went on without it.
void expect_named(const Report& report, int signal) {
  EXPECT_EQ(report.finished, kRanks - 1);
  for (int rank = 0; rank < kRanks; ++rank) {
    if (rank == kVictim) continue;
    const Report::Rank& r = report.ranks[static_cast<std::size_t>(rank)];
    SCOPED_TRACE(fmt::format("rank {}: {}", rank, r.what));
    EXPECT_TRUE(r.failed);
    EXPECT_EQ(r.peer, kVictim);
    EXPECT_EQ(r.code, signal == SIGKILL ? ErrorCode::peer_failed : ErrorCode::timeout);
    EXPECT_LT(r.seconds, kDeadline.count() + 1.0);
    EXPECT_TRUE(r.went_on);
  }
}

void expect_survivors_name_the_victim(const Case& c) {
  const Batch batch = make_batch(24, kRanks, 8, 2, 16, 21);
  ExchangeConfig config = config_for(batch);
  config.deadline = kDeadline;
  const Shared<Report> report;
  try {
    run_processes(kRanks, [&](Group& group) { survive(group, batch, config, c, *report); },
                  {.deadline = kDeadline});
    EXPECT_EQ(c.signal, kLate);  // only then have all ranks ended by themselves
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::peer_failed) << error.what();
  }
  expect_named(*report, c.signal);
  if (c.signal == kLate) {
    const Report::Rank& late = report->ranks[kVictim];
    EXPECT_TRUE(late.failed && late.code == ErrorCode::timeout && late.peer == kVictim)
        << late.what;
  }
  for (int rank = 0; rank < kRanks; ++rank) {
    if (rank == kVictim) continue;
    const Report::Rank& r = report->ranks[static_cast<std::size_t>(rank)];
    SCOPED_TRACE(fmt::format("rank {}: {}", rank, r.what));
    // The stage is where the victim was missed: never before the one it was struck in.
    const Stage earliest = c.channel == Channel::counts     ? Stage::plan
                           : c.channel == Channel::dispatch ? Stage::dispatch_recv
                                                            : Stage::combine_recv;
    const bool next_step =
        c.channel == Channel::combine && c.when != When::before_first && r.stage == Stage::plan;
    EXPECT_TRUE(r.stage >= earliest || next_step) << name(r.stage);
  }
}

class FaultAt : public ::testing::TestWithParam<Case> {};

TEST_P(FaultAt, EverySurvivorNamesTheRankWithinTheDeadline) {
  expect_survivors_name_the_victim(GetParam());
}

std::string signal_name(int signal) {
  return signal == SIGKILL ? "Killed" : signal == SIGSTOP ? "Stopped" : "Late";
}

std::string case_name(const ::testing::TestParamInfo<Case>& info) {
  constexpr const char* kChannels[] = {"Counts", "Dispatch", "Combine"};
  constexpr const char* kWhen[] = {"BeforeTheFirst", "InTheMiddle", "AfterTheLast"};
  return fmt::format("{}{}{}", signal_name(info.param.signal),
                     kWhen[static_cast<int>(info.param.when)],
                     kChannels[static_cast<int>(info.param.channel)]);
}

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  for (const int signal : {SIGKILL, SIGSTOP, kLate}) {
    for (const Channel channel : {Channel::counts, Channel::dispatch, Channel::combine}) {
      for (const When when : {When::before_first, When::in_the_middle, When::after_last}) {
        cases.push_back({channel, when, signal});
      }
    }
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(EveryStage, FaultAt, ::testing::ValuesIn(all_cases()), case_name);

// The victim stops after it has signalled ranks 3 and 0, but not 1. Rank 3 goes on and waits for rank
// 1's results; rank 1 begins to wait for the victim later, so rank 3's deadline passes first.
TEST(Fault, AWaitThatBeganEarlierNamesTheRankAtTheRootAndNotTheOneItWaitsFor) {
  expect_survivors_name_the_victim({Channel::dispatch, When::in_the_middle, SIGSTOP, 1});
}

// Where start-up is when it strikes.
enum class StartUp { before_all, before_windows, after_windows };

struct StartUpCase {
  StartUp at;
  int signal;
};

void survive_start_up(Group& group, const StartUpCase& c, Report& report) {
  const Batch batch = make_batch(24, kRanks, 8, 2, 16, 22);
  ExchangeConfig config = config_for(batch);
  config.deadline = kDeadline;
  if (group.rank() == kVictim) {
    report.victim = getpid();
    if (c.at == StartUp::before_all) strike(c.signal, report);
    detail::GroupState& state = group.state();
    state.connect = [&, real = state.connect](const Group& of, const WindowRequest& request) {
      if (c.at == StartUp::before_windows) strike(c.signal, report);
      std::unique_ptr<Fabric> fabric = real(of, request);
      if (c.at == StartUp::after_windows) strike(c.signal, report);
      return fabric;
    };
  }
  Report::Rank& mine = report.ranks[static_cast<std::size_t>(group.rank())];
  try {
    const Exchange exchange(group, config);
  } catch (const Error& error) {
    mine.seconds = now() - report.struck;
    mine.peer = error.peer();
    mine.code = error.code();
    mine.failed = true;
    std::snprintf(mine.what, sizeof(mine.what), "%s", error.what());
  }
  if (group.rank() == kVictim) return;
  go_on(group, report);
  finish(c.signal, report);
}

class FaultAtStartUp : public ::testing::TestWithParam<StartUpCase> {};

TEST_P(FaultAtStartUp, EverySurvivorNamesTheRankWithinTheDeadline) {
  const StartUpCase& c = GetParam();
  const Shared<Report> report;
  try {
    run_processes(kRanks, [&](Group& group) { survive_start_up(group, c, *report); },
                  {.deadline = kDeadline});
    EXPECT_EQ(c.signal, kLate);
  } catch (const Error& error) {
    EXPECT_TRUE(error.code() == ErrorCode::peer_failed) << error.what();
  }
  expect_named(*report, c.signal);
}

std::string start_up_name(const ::testing::TestParamInfo<StartUpCase>& info) {
  constexpr const char* kAt[] = {"BeforeAll", "BeforeWindows", "AfterWindows"};
  return signal_name(info.param.signal) + kAt[static_cast<int>(info.param.at)];
}

std::vector<StartUpCase> start_up_cases() {
  std::vector<StartUpCase> cases;
  for (const int signal : {SIGKILL, SIGSTOP, kLate}) {
    for (const StartUp at :
         {StartUp::before_all, StartUp::before_windows, StartUp::after_windows}) {
      cases.push_back({at, signal});
    }
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Everywhere, FaultAtStartUp, ::testing::ValuesIn(start_up_cases()),
                         start_up_name);

// A rank that returns without its exchange, which a launcher cannot tell from one it never started.
TEST(FaultAtStartUp, ARankThatLeavesIsNamedAtOnce) {
  const Shared<Report> report;
  run_processes(kRanks, [&](Group& group) {
    report->struck = now();
    if (group.rank() != kVictim) survive_start_up(group, {StartUp::before_all, kLate}, *report);
  });
  expect_named(*report, SIGKILL);
}

std::size_t entries_of(const char* folder) {
  std::size_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(folder)) ++count;
  return count;
}

TEST(Launcher, KilledTakesAllRanksWithItWithinASecondAndLeavesNothing) {
  prctl(PR_SET_CHILD_SUBREAPER, 1);  // orphans come to us, so that we can see them gone
  const std::size_t before = entries_of("/dev/shm");
  struct Pids {
    std::atomic<int> ready;
    std::array<std::atomic<pid_t>, kRanks> pid;
  };
  const Shared<Pids> pids;
  const pid_t launcher = fork();
  if (launcher == 0) {
    const Batch batch = make_batch(24, kRanks, 8, 2, 16, 23);
    run_processes(kRanks, [&](Group& group) {
      Exchange exchange(group, config_for(batch));
      pids->pid[static_cast<std::size_t>(group.rank())] = getpid();
      ++pids->ready;
      for (;;) static_cast<void>(run_layer<Bf16>(exchange, batch));
    });
    _exit(0);
  }
  while (pids->ready < kRanks) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  const double start = now();
  kill(launcher, SIGKILL);
  int left = kRanks + 1;
  while (left > 0 && now() - start < 5.0) {
    if (waitpid(-1, nullptr, WNOHANG) > 0) --left;
  }
  EXPECT_EQ(left, 0);
  EXPECT_LT(now() - start, 1.0);
  EXPECT_EQ(entries_of("/dev/shm"), before);
}

TEST(Launcher, RethrowsTheFirstErrorOfARank) {
  try {
    run_processes(3, [](Group& group) {
      if (group.rank() == 1) {
        throw Error(ErrorCode::capacity, {Stage::plan, 1, -1}, "no room");
      }
      group.barrier();
    });
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::capacity);
    EXPECT_EQ(error.rank(), 1);
    EXPECT_EQ(error.message(), "no room");
  }
}

TEST(Launcher, EndsItsRanksWhenCancelled) {
  std::atomic<bool> cancelled{false};
  static std::atomic<bool>* flag = nullptr;  // a thread must not exist before the fork: use a timer
  flag = &cancelled;
  signal(SIGALRM, [](int) { flag->store(true); });
  alarm(1);
  const double start = now();
  try {
    run_processes(3, [](Group&) { pause(); }, {.cancelled = &cancelled});
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::interrupted);
  }
  EXPECT_LT(now() - start, 3.0);
}

}  // namespace
}  // namespace wherry::test
