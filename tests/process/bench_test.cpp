// The command `wherry bench`, run as users run it: it measures verified steps and prints what
// docs/performance.md promises.
#include <gmock/gmock.h>
#include <sys/wait.h>

#include <cstdio>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

namespace {

using Json = nlohmann::json;

struct Result {
  int status;
  std::vector<Json> objects;  // one a line
};

Result bench(const std::string& arguments) {
  const std::string command = std::string(WHERRY_COMMAND) + " bench --json " + arguments;
  FILE* const pipe = popen(command.c_str(), "r");
  std::string text;
  char buffer[4096];
  for (std::size_t count = 0; (count = fread(buffer, 1, sizeof(buffer), pipe)) > 0;)
    text.append(buffer, count);
  Result result{WEXITSTATUS(pclose(pipe)), {}};
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) result.objects.push_back(Json::parse(line));
  return result;
}

constexpr const char* kSmall = "--tokens 9 --hidden 72 --topk 3 --experts 7 --steps 3 --warmup 1 ";

}  // namespace

TEST(Bench, PrintsEveryFieldOfAVerifiedMeasurement) {
  const Result result = bench(std::string(kSmall) + "--ranks 3");
  ASSERT_EQ(result.status, 0);
  ASSERT_EQ(result.objects.size(), 1U);
  const Json& o = result.objects.front();
  for (const char* const field : {"ranks",
                                  "tokens",
                                  "hidden",
                                  "topk",
                                  "experts",
                                  "layout",
                                  "reduction",
                                  "kernels",
                                  "plan_us",
                                  "dispatch_us",
                                  "combine_us",
                                  "total_us",
                                  "bytes",
                                  "copy_gbps",
                                  "floor_us",
                                  "floor_fraction",
                                  "involuntary_switches",
                                  "p50",
                                  "p99",
                                  "window_bytes",
                                  "fabric"}) {
    EXPECT_TRUE(o.contains(field)) << field;
  }
  EXPECT_EQ(o["verified"], true);
  EXPECT_EQ(o["fabric"], "shm");
  EXPECT_GT(o["total_us"], 0.0);
  EXPECT_GT(o["floor_us"], 0.0);
  EXPECT_GE(o["p99"]["total_us"], o["p50"]["total_us"]);
}

TEST(Bench, CountsTheRowsThatMove) {
  // Every token has 3 choices: by_token moves 3 rows of 144 bytes each way for each of 2 x 9.
  const Result result = bench(std::string(kSmall) + "--ranks 2 --reduction by_token");
  ASSERT_EQ(result.status, 0);
  EXPECT_EQ(result.objects.front()["bytes"], 2 * 3 * 144 * 2 * 9);
}

TEST(Bench, MeasuresEveryLayoutAndHalvesInFlight) {
  for (const char* const flags :
       {"--layout tokens", "--layout slots", "--layout grouped --alignment 4",
        "--layout slots --reduction by_rank --depth 2 --halves", "--no-identity --threads"}) {
    const Result result = bench(std::string(kSmall) + "--ranks 2 " + flags);
    EXPECT_EQ(result.status, 0) << flags;
    ASSERT_EQ(result.objects.size(), 1U) << flags;
    EXPECT_EQ(result.objects.front()["verified"], true) << flags;
  }
}

TEST(Bench, SweepsOverTokens) {
  const Result result = bench(std::string(kSmall) + "--ranks 2 --sweep");
  ASSERT_EQ(result.status, 0);
  std::vector<int> tokens;
  for (const Json& o : result.objects) tokens.push_back(o["tokens"]);
  EXPECT_THAT(tokens, ::testing::ElementsAre(1, 2, 4, 8, 9));
}

TEST(Bench, RefusesWhatCannotBeMeasured) {
  EXPECT_EQ(bench("--topk 9 --experts 8").status, 2);
  EXPECT_EQ(bench("--layout rows").status, 2);
  EXPECT_EQ(bench("--layout tokens --reduction by_token").status, 2);
}
