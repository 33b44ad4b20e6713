// Groups of ranks that a launcher has started: what the environment says, and that every start that
// goes wrong ends in a sentence on every rank.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <map>

#include "group/start.hpp"
#include "support/layer.hpp"

namespace wherry::test {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;

using Variables = std::map<std::string, std::string>;

Start start(const Variables& variables) {
  return start_from(
      [&](const char* name) -> const char* {
        const auto found = variables.find(name);
        return found == variables.end() ? nullptr : found->second.c_str();
      },
      "job");
}

std::string refused(const Variables& variables) {
  try {
    static_cast<void>(start(variables));
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::bad_argument);
    return error.what();
  }
  return {};
}

TEST(Environment, SaysRankAndSizeInTheWordsOfEveryLauncher) {
  for (const auto& [rank, size] :
       std::map<std::string, std::string>{{"WHERRY_RANK", "WHERRY_SIZE"},
                                          {"RANK", "WORLD_SIZE"},
                                          {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"},
                                          {"PMI_RANK", "PMI_SIZE"},
                                          {"SLURM_PROCID", "SLURM_NTASKS"}}) {
    const Start s = start({{rank, "2"}, {size, "5"}});
    EXPECT_EQ(s.rank, 2) << rank;
    EXPECT_EQ(s.size, 5) << rank;
    EXPECT_THAT(s.address.text(), HasSubstr("job"));
  }
  // An own word goes before a launcher's: a subset of its ranks may be a group.
  EXPECT_EQ(
      start({{"RANK", "7"}, {"WORLD_SIZE", "8"}, {"WHERRY_RANK", "1"}, {"WHERRY_SIZE", "2"}}).rank,
      1);
}

TEST(Environment, SaysWhereTheRanksMeet) {
  const Variables two{{"RANK", "0"}, {"WORLD_SIZE", "2"}};
  Variables v = two;
  v["MASTER_ADDR"] = "node7";
  v["MASTER_PORT"] = "29500";
  EXPECT_EQ(start(v).address.text(), "node7:29501");
  v["WHERRY_PORT"] = "4000";
  EXPECT_EQ(start(v).address.text(), "node7:4000");
  v = two;
  v["SLURM_JOB_ID"] = "99";
  EXPECT_THAT(start(v).address.text(), HasSubstr("-99'"));
}

TEST(Environment, WhatIsWrongIsNamedWithWhatIsAllowed) {
  EXPECT_THAT(refused({}), AllOf(HasSubstr("OMPI_COMM_WORLD_RANK"), HasSubstr("WHERRY_SIZE")));
  EXPECT_THAT(refused({{"RANK", "0"}}), HasSubstr("WORLD_SIZE is not"));
  EXPECT_THAT(refused({{"RANK", "3"}, {"WORLD_SIZE", "3"}}),
              HasSubstr("RANK is '3'; it must be a whole number from 0 to 2"));
  EXPECT_THAT(refused({{"RANK", "one"}, {"WORLD_SIZE", "3"}}), HasSubstr("'one'"));
  EXPECT_THAT(refused({{"RANK", "0"}, {"WORLD_SIZE", "0"}}), HasSubstr("WORLD_SIZE is '0'"));
  EXPECT_THAT(refused({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "a"}}),
              HasSubstr("MASTER_PORT"));
  EXPECT_THAT(
      refused({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "a"}, {"WHERRY_PORT", "70000"}}),
      HasSubstr("WHERRY_PORT is '70000'"));
}

// ---- Processes -------------------------------------------------------------------------------

// A port that was free a moment ago.
int free_port() {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  EXPECT_EQ(bind(fd, reinterpret_cast<sockaddr*>(&address), length), 0);
  EXPECT_EQ(getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length), 0);
  close(fd);
  return ntohs(address.sin_port);
}

constexpr int kMost = 8;

// Starts one process for each entry of `ranks`, as a launcher would; `body` runs in each with its
// number among them. What each threw (or "done"), in order.
std::vector<std::string> launch(const std::vector<int>& ranks, int size, Variables variables,
                                const std::function<void(int)>& body) {
  using Text = char[512];
  auto* const texts = static_cast<Text*>(mmap(nullptr, sizeof(Text) * kMost, PROT_READ | PROT_WRITE,
                                              MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  std::vector<pid_t> children;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    const pid_t pid = fork();
    if (pid == 0) {
      variables["WHERRY_RANK"] = std::to_string(ranks[i]);
      if (!variables.contains("WHERRY_SIZE")) variables["WHERRY_SIZE"] = std::to_string(size);
      for (const auto& [name, value] : variables) setenv(name.c_str(), value.c_str(), 1);
      std::string text = "done";
      try {
        body(static_cast<int>(i));
      } catch (const std::exception& error) {
        text = error.what();
      }
      text.copy(texts[i], sizeof(Text) - 1);
      _exit(0);
    }
    children.push_back(pid);
  }
  for (const pid_t pid : children) waitpid(pid, nullptr, 0);
  std::vector<std::string> result(texts, texts + ranks.size());
  munmap(texts, sizeof(Text) * kMost);
  return result;
}

Variables same_host() { return {{"WHERRY_JOB", fmt::format("test-{}", getpid())}}; }
Variables tcp() {
  return {{"MASTER_ADDR", "127.0.0.1"}, {"WHERRY_PORT", std::to_string(free_port())}};
}

void run_a_layer(Group& group, int ranks) {
  const Batch batch = make_batch(20, ranks, 6, 2, 16, 71);
  run_and_verify<Bf16>(group, batch, config_for(batch));
}

TEST(FromEnvironment, RanksMeetOverEitherSocketAgainAndInPairs) {
  for (const Variables& variables : {same_host(), tcp()}) {
    const auto ends = launch({2, 0, 3, 1}, 4, variables, [](int) {
      for (int round = 0; round < 3; ++round) {
        Group group = Group::from_environment(Seconds(20));
        run_a_layer(group, 4);
        const std::vector<int> pair = group.rank() < 2 ? std::vector{0, 1} : std::vector{3, 2};
        Group half = group.subgroup(pair, Seconds(20));
        run_a_layer(half, 2);
      }
    });
    EXPECT_THAT(ends, Each("done"));
  }
}

TEST(FromEnvironment, OneRankNeedsNobody) {
  EXPECT_THAT(launch({0}, 1, {},
                     [](int) {
                       Group group = Group::from_environment();
                       run_a_layer(group, 1);
                     }),
              Each("done"));
}

TEST(FromEnvironment, MessagesOfAnySizeArriveInTheOrderOfTheRanks) {
  const auto ends = launch({0, 1, 2}, 3, tcp(), [](int i) {
    Group group = Group::from_environment(Seconds(20));
    for (const std::size_t size : {std::size_t{0}, std::size_t{1}, std::size_t{3'000'000}}) {
      const Group::Bytes mine(size * static_cast<std::size_t>(i), static_cast<std::byte>(i));
      const auto all = group.allgather(mine);
      for (std::size_t peer = 0; peer < 3; ++peer) {
        expect(all[peer] == Group::Bytes(size * peer, static_cast<std::byte>(peer)), "wrong bytes");
      }
    }
  });
  EXPECT_THAT(ends, Each("done"));
}

TEST(FromEnvironment, ARankThatNeverComesIsNamedOnAllThatDid) {
  const auto ends = launch({0, 1, 3}, 4, same_host(),
                           [](int) { static_cast<void>(Group::from_environment(Seconds(0.5))); });
  EXPECT_THAT(ends, Each(AllOf(HasSubstr("timeout"), HasSubstr(": 2"), HasSubstr("of 4 ranks"))));
  const auto alone = launch({1}, 2, same_host(),
                            [](int) { static_cast<void>(Group::from_environment(Seconds(0.3))); });
  EXPECT_THAT(alone, Each(AllOf(HasSubstr("timeout"), HasSubstr("rank 0 did not come"))));
}

TEST(FromEnvironment, ADifferentNumberOfRanksOrTheSameRankTwiceIsNamed) {
  const auto body = [](int i) {
    if (i == 1) setenv("WHERRY_SIZE", "3", 1);
    static_cast<void>(Group::from_environment(Seconds(5)));
  };
  EXPECT_THAT(launch({0, 1}, 2, tcp(), body),
              Each(AllOf(HasSubstr("config_mismatch"),
                         HasSubstr("the number of ranks is 2 on rank 0 and 3 on rank 1"))));
  const auto twice = launch({0, 1, 1}, 3, tcp(),
                            [](int) { static_cast<void>(Group::from_environment(Seconds(5))); });
  EXPECT_THAT(twice, Each(HasSubstr("two processes say that they are rank 1")));
}

TEST(FromEnvironment, ARankThatEndsIsNamedByAllOthers) {
  for (const int dead : {0, 1}) {
    const auto ends = launch({0, 1, 2}, 3, tcp(), [dead](int i) {
      const Group group = Group::from_environment(Seconds(5));
      if (i == dead) _exit(0);
      group.barrier();
    });
    for (std::size_t i = 0; i < 3; ++i) {
      if (static_cast<int>(i) == dead) continue;
      EXPECT_THAT(ends[i], AllOf(HasSubstr("peer_failed"),
                                 HasSubstr(fmt::format("rank {} has ended", dead))));
    }
  }
}

TEST(FromEnvironment, StrangersAtTheDoorAreTurnedAway) {
  const Variables variables = tcp();
  const auto ends = launch({0, 1, 1}, 2, variables, [&](int i) {
    if (i == 1) {  // speaks something else
      sockaddr_in address{};
      address.sin_family = AF_INET;
      address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
      address.sin_port = htons(static_cast<std::uint16_t>(std::stoi(variables.at("WHERRY_PORT"))));
      const int fd = socket(AF_INET, SOCK_STREAM, 0);
      while (connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0) usleep(1000);
      static_cast<void>(!send(fd, "GET / HTTP/1.1\r\n\r\n", 18, MSG_NOSIGNAL));
      close(fd);
      return;
    }
    if (i == 2) usleep(100'000);  // after the stranger
    Group group = Group::from_environment(Seconds(20));
    run_a_layer(group, 2);
  });
  EXPECT_THAT(ends, Each("done"));
}

// Under mpirun this test runs itself, once a rank.
TEST(FromEnvironment, WorksUnderMpirun) {
  if (getenv("WHERRY_TEST_UNDER_MPIRUN") != nullptr) {
    Group group = Group::from_environment(Seconds(20));
    ASSERT_EQ(group.size(), 3);
    run_a_layer(group, 3);
    return;
  }
  if (std::system("command -v mpirun >/dev/null 2>&1") != 0) {
    GTEST_SKIP() << "mpirun is missing: scripts/install_packages.sh test";
  }
  std::array<char, 4096> self{};
  ASSERT_GT(readlink("/proc/self/exe", self.data(), self.size() - 1), 0);
  const std::string command = fmt::format(
      "WHERRY_TEST_UNDER_MPIRUN=1 mpirun --allow-run-as-root --oversubscribe -n 3 {} "
      "--gtest_filter=FromEnvironment.WorksUnderMpirun >/dev/null 2>&1",
      self.data());
  EXPECT_EQ(std::system(command.c_str()), 0) << command;
}

}  // namespace
}  // namespace wherry::test
