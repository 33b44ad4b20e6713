// However a layer ends before its time, no rank outlives it and nothing stays in /dev/shm.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <string>

#include "cli/command.hpp"

namespace wherry::test {
namespace {

using testing::HasSubstr;

// Runs for minutes if nothing ends it.
const char* const kLong =
    "layer --ranks 3 --hidden 64 --experts 6 --topk 2 --expert-hidden 32 --steps 100000 --json ";

// Whether a process has memory of /dev/shm mapped: what has a name there can outlive its users. (To
// count the files there would count those of other programs.)
bool maps_dev_shm(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/maps");
  const std::string maps{std::istreambuf_iterator<char>(file), {}};
  EXPECT_NE(maps, "");
  return maps.find("/dev/shm/") != std::string::npos;
}

// Returns when none of the processes exists any more, not even as a zombie of ours.
void wait_until_gone(const std::vector<pid_t>& pids) {
  const double start = now();
  for (const pid_t pid : pids) {
    while (kill(pid, 0) == 0) {
      ASSERT_LT(now() - start, 20.0) << "process " << pid << " lives on";
      waitpid(pid, nullptr, WNOHANG);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
}

void let_steps_run() { std::this_thread::sleep_for(std::chrono::milliseconds(700)); }

class Interrupt : public testing::TestWithParam<std::tuple<const char*, int>> {};

TEST_P(Interrupt, IsOneSentenceAndExitCodeTwoWithinASecond) {
  const auto [ranks_are, signal] = GetParam();
  Command command(words(std::string(kLong) + "--" + ranks_are));
  const auto ranks = command.children(ranks_are == std::string("processes") ? 3 : 0);
  let_steps_run();
  for (const pid_t rank : ranks) EXPECT_FALSE(maps_dev_shm(rank));
  const double start = now();
  kill(command.pid(), signal);
  const Finished done = command.wait();
  EXPECT_LT(now() - start, 1.0);
  EXPECT_EQ(done.code, 2);
  EXPECT_EQ(done.out, "");
  EXPECT_EQ(done.err, "wherry: interrupted; the ranks were ended\n");
  for (const pid_t rank : ranks) EXPECT_EQ(kill(rank, 0), -1);
}

INSTANTIATE_TEST_SUITE_P(By, Interrupt,
                         testing::Combine(testing::Values("processes", "threads"),
                                          testing::Values(SIGINT, SIGTERM)),
                         [](const auto& test) {
                           return std::string(std::get<0>(test.param)) +
                                  (std::get<1>(test.param) == SIGINT ? "_SIGINT" : "_SIGTERM");
                         });

TEST(LayerLauncher, KilledTakesItsRanksWithItWithinASecond) {
  Command command(words(kLong));
  const auto ranks = command.children(3);
  let_steps_run();
  for (const pid_t rank : ranks) EXPECT_FALSE(maps_dev_shm(rank));
  const double start = now();
  kill(command.pid(), SIGKILL);
  EXPECT_EQ(command.wait().code, 128 + SIGKILL);
  wait_until_gone(ranks);
  EXPECT_LT(now() - start, 1.0);
}

TEST(LayerLauncher, NamesARankThatWasKilled) {
  Command command(words(std::string(kLong) + "--deadline 5"));
  const auto ranks = command.children(3);
  let_steps_run();
  kill(ranks[1], SIGKILL);
  const Finished done = command.wait();
  EXPECT_EQ(done.code, 1);
  EXPECT_EQ(done.out, "");
  EXPECT_THAT(done.err, HasSubstr("rank 1"));
  EXPECT_EQ(std::ranges::count(done.err, '\n'), 1) << done.err;
  wait_until_gone(ranks);
}

}  // namespace
}  // namespace wherry::test
