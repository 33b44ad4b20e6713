// `wherry bench` measures verified steps and prints what docs/performance.md promises.
#include <gmock/gmock.h>

#include <sstream>

#include "cli/command.hpp"
#include "support/devices.hpp"

namespace wherry::test {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

Finished bench(const std::string& arguments) {
  return wherry(
      words("bench --tokens 9 --hidden 72 --topk 3 --experts 7 --steps 3 --warmup 1 " + arguments));
}

}  // namespace

TEST(Bench, PrintsEveryFieldOfAVerifiedMeasurement) {
  const Finished done = bench("--ranks 3 --json");
  ASSERT_EQ(done.code, 0) << done.err;
  const auto o = done.json();
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
                                  "fabric",
                                  "version",
                                  "commit"}) {
    EXPECT_TRUE(o.contains(field)) << field;
  }
  EXPECT_EQ(o["verified"], true);
  EXPECT_EQ(o["fabric"], "shm");
  EXPECT_GT(o["total_us"], 0.0);
  EXPECT_GT(o["floor_us"], 0.0);
  EXPECT_GE(o["p99"]["total_us"], o["p50"]["total_us"]);
}

TEST(BenchOnCuda, SaysWhyWhereThereIsNoGpu) {
  if (!find_devices().found.empty()) GTEST_SKIP() << "there is a GPU; scripts/gpu_test.sh runs it";
  for (const char* ranks_are : {"--processes", "--threads"}) {
    const Finished done = wherry({"bench", "--ranks", "2", "--device", "cuda", ranks_are});
    EXPECT_EQ(done.code, 2);
    EXPECT_EQ(done.out, "");
    EXPECT_THAT(done.err,
                testing::AnyOf(HasSubstr("there is none"), HasSubstr("this build has no CUDA")));
  }
}

TEST(Bench, ReportsTheBytesAndTheErrorOfAFormat) {
  const Finished plain = bench("--ranks 2 --json");
  ASSERT_EQ(plain.code, 0) << plain.err;
  EXPECT_EQ(plain.json()["wire_error"], 0.0);
  const Finished done = bench("--ranks 2 --wire e4m3_block128 --combine-wire int8_token --json");
  ASSERT_EQ(done.code, 0) << done.err;
  const auto o = done.json();
  EXPECT_EQ(o["wire"], "e4m3_block128");
  EXPECT_EQ(o["combine_wire"], "int8_token");
  EXPECT_EQ(o["verified"], true);
  EXPECT_GT(o["wire_error"], 0.001);
  EXPECT_LT(o["wire_error"], 0.1);
  EXPECT_LT(o["bytes"], plain.json()["bytes"]);
  const Finished wrong = bench("--wire fp3");
  EXPECT_EQ(wrong.code, 2);
  EXPECT_THAT(wrong.err, HasSubstr("nvfp4"));
}

TEST(Bench, CountsTheRowsThatMove) {
  // Every token has 3 choices: by_token moves 3 rows of 144 bytes each way for each of 2 x 9.
  const Finished done = bench("--ranks 2 --reduction by_token --json");
  ASSERT_EQ(done.code, 0) << done.err;
  EXPECT_EQ(done.json()["bytes"], 2 * 3 * 144 * 2 * 9);
}

TEST(Bench, MeasuresEveryLayoutAndHalvesInFlight) {
  for (const char* const flags :
       {"--layout tokens", "--layout slots", "--layout grouped --alignment 4",
        "--layout slots --reduction by_rank --depth 2 --halves", "--no-identity --threads"}) {
    const Finished done = bench(std::string("--ranks 2 --json ") + flags);
    ASSERT_EQ(done.code, 0) << flags << ": " << done.err;
    EXPECT_EQ(done.json()["verified"], true) << flags;
  }
}

TEST(Bench, RunsTheKernelsItIsToldTo) {
  const Finished done = bench("--ranks 2 --kernels reference --json");
  ASSERT_EQ(done.code, 0) << done.err;
  EXPECT_EQ(done.json()["kernels"], "reference");
}

TEST(Bench, SweepsOverTokens) {
  const Finished done = bench("--ranks 2 --sweep --json");
  ASSERT_EQ(done.code, 0) << done.err;
  std::istringstream lines(done.out);
  std::vector<int> tokens;
  for (std::string line; std::getline(lines, line);)
    tokens.push_back(nlohmann::json::parse(line)["tokens"]);
  EXPECT_THAT(tokens, ElementsAre(1, 2, 4, 8, 9));
}

TEST(Bench, PrintsATableForPeople) {
  EXPECT_THAT(bench("--ranks 2").out, HasSubstr("equals the dense reference bit for bit"));
  EXPECT_THAT(bench("--ranks 2 --sweep").out, HasSubstr("of floor"));
}

TEST(Bench, SaysWhatDoesNotFit) {
  const Finished done = wherry(words("bench --layout slots --tokens 4000000"));
  EXPECT_EQ(done.code, 2);
  EXPECT_THAT(done.err, HasSubstr("--rows-per-slot"));
}

}  // namespace wherry::test
