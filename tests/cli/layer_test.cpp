// wherry layer: every layout over threads and processes is verified, and says what it did.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cli/command.hpp"
#include "support/devices.hpp"

namespace wherry::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

const char* const kSmall = "layer --hidden 72 --experts 7 --topk 3 --expert-hidden 40 --tokens 11 ";

class Layer : public testing::TestWithParam<std::tuple<const char*, const char*, const char*>> {};

TEST_P(Layer, IsVerifiedAndSaysWhatItDid) {
  const auto [ranks_are, layout, reduction] = GetParam();
  const Finished done =
      wherry(words(std::string(kSmall) + "--ranks 3 --skew 1 --seed 5 --depth 2 --steps 3 --json" +
                   " --" + ranks_are + " --layout " + layout + " --reduction " + reduction));
  ASSERT_EQ(done.code, 0) << done.err;
  EXPECT_EQ(done.err, "");  // no progress where there is no terminal
  const auto layer = done.json();
  EXPECT_EQ(layer["command"], "layer");
  EXPECT_EQ(layer["ranks"], 3);
  EXPECT_EQ(layer["ranks_are"], ranks_are);
  EXPECT_EQ(layer["model"], "deepseek-v3");
  EXPECT_EQ(layer["tokens"], 11);
  EXPECT_EQ(layer["hidden"], 72);
  EXPECT_EQ(layer["experts"], 7);
  EXPECT_EQ(layer["topk"], 3);
  EXPECT_EQ(layer["layout"], layout);
  EXPECT_EQ(layer["reduction"], reduction);
  EXPECT_EQ(layer["verified"], true);
  EXPECT_EQ(layer["verified_tokens"], 33);
  EXPECT_GT(layer["max_error"], 0.0);
  EXPECT_LE(layer["max_error"], layer["tolerance"]);
  EXPECT_EQ(layer["rows_received"], 99);
  EXPECT_EQ(layer["fabric"], ranks_are == std::string("threads") ? "process" : "shm");
  EXPECT_NE(layer["kernels"], "");
  for (const char* time : {"plan_us", "dispatch_us", "experts_us", "combine_us"}) {
    EXPECT_GT(layer[time]["p50"], 0.0) << time;
    EXPECT_GE(layer[time]["p99"], layer[time]["p50"]) << time;
  }
  EXPECT_GT(layer["bytes_sent"], 0);
  EXPECT_LT(layer["link_bytes"], layer["bytes_sent"]);
}

INSTANTIATE_TEST_SUITE_P(Over, Layer,
                         testing::Values(std::tuple{"threads", "grouped", "by_rank"},
                                         std::tuple{"threads", "tokens", "by_rank"},
                                         std::tuple{"threads", "slots", "by_token"},
                                         std::tuple{"processes", "grouped", "by_rank"},
                                         std::tuple{"processes", "grouped", "by_token"},
                                         std::tuple{"processes", "tokens", "by_rank"},
                                         std::tuple{"processes", "slots", "by_token"},
                                         std::tuple{"processes", "slots", "by_rank"}),
                         [](const auto& test) {
                           return std::string(std::get<0>(test.param)) + "_" +
                                  std::get<1>(test.param) + "_" + std::get<2>(test.param);
                         });

TEST(LayerShapes, RanksThatHoldTheSameTokensSendEachOnce) {
  const std::string four = std::string(kSmall) + "--ranks 4 --steps 2 ";
  const Finished done = wherry(words(four + "--json --replicated 2"));
  ASSERT_EQ(done.code, 0) << done.err;
  EXPECT_EQ(done.json()["replicated"], 2);
  EXPECT_EQ(done.json()["verified_tokens"], 22);
  EXPECT_EQ(done.json()["rows_received"], 66);
  const Finished text = wherry(words(four + "--replicated 4"));
  EXPECT_THAT(text.out, AllOf(HasSubstr("11 tokens for every 4 of them alike"),
                              HasSubstr("verified 11 of 11 tokens")));
  const Finished uneven = wherry(words(four + "--replicated 3"));
  EXPECT_EQ(uneven.code, 2);
  EXPECT_THAT(uneven.err, HasSubstr("--replicated is 3; it must divide the 4 ranks"));
}

TEST(LayerShapes, OneRankAndMoreRanksThanExperts) {
  for (const char* ranks : {"--ranks 1", "--ranks 8"}) {
    const Finished done = wherry(words(std::string(kSmall) + ranks + " --json"));
    ASSERT_EQ(done.code, 0) << ranks << ": " << done.err;
    EXPECT_EQ(done.json()["verified"], true) << ranks;
  }
}

TEST(LayerShapes, EveryKernelSetGivesTheSameErrors) {
  const auto kernels = wherry({"info", "--json"}).json()["kernels"];
  std::vector<double> errors;
  for (const std::string set : kernels) {
    const Finished done = wherry(words(std::string(kSmall) + "--json --kernels " + set));
    ASSERT_EQ(done.code, 0) << set << ": " << done.err;
    EXPECT_EQ(done.json()["kernels"], set);
    errors.push_back(done.json()["max_error"]);
  }
  EXPECT_THAT(errors, testing::Each(errors.front()));
}

TEST(LayerShapes, BeyondTwentyGflopSixtyFourTokensAreVerified) {
  // 2 ranks, 1500 tokens, 8 choices, 6 * 1024 * 512 operations each: 75 GFLOP.
  const Finished done =
      wherry(words("layer --ranks 2 --hidden 1024 --experts 8 --topk 8 --expert-hidden 512 "
                   "--tokens 1500 --steps 1 --json"));
  ASSERT_EQ(done.code, 0) << done.err;
  EXPECT_EQ(done.json()["verified_tokens"], 64);
  EXPECT_EQ(done.json()["verified"], true);
}

TEST(LayerShapes, EveryPresetRunsWithItsOwnRouter) {
  const auto models = wherry({"info", "--json"}).json()["models"];
  for (const auto& model : models) {
    const std::string name = model["name"];
    const Finished done =
        wherry(words("layer --hidden 64 --expert-hidden 32 --tokens 6 --steps 1 "
                     "--ranks 2 --threads --json --model " +
                     name));
    ASSERT_EQ(done.code, 0) << name << ": " << done.err;
    EXPECT_EQ(done.json()["verified"], true) << name;
    EXPECT_EQ(done.json()["experts"], model["experts"]) << name;
    EXPECT_NE(done.json()["router"], "") << name;
  }
}

TEST(LayerWires, FormatsOnTheWayAreVerifiedWithinTheirOwnBounds) {
  const double plain = wherry(words(std::string(kSmall) + "--json")).json()["tolerance"];
  for (const std::string layout : {"grouped", "tokens", "slots"}) {
    for (const std::string wire : {"e4m3_block128", "mxfp8_e5m2", "nvfp4", "int8_token"}) {
      const std::string flags =
          fmt::format("{} --json --layout {} --wire {}", kSmall, layout, wire);
      const Finished out = wherry(words(flags));
      ASSERT_EQ(out.code, 0) << layout << " " << wire << ": " << out.err;
      EXPECT_EQ(out.json()["tolerance"], plain) << "the experts' input is known exactly";
      const Finished both = wherry(words(fmt::format("{} --combine-wire {}", flags, wire)));
      ASSERT_EQ(both.code, 0) << layout << " " << wire << ": " << both.err;
      EXPECT_GT(both.json()["max_error"], out.json()["max_error"]);
      EXPECT_LT(both.json()["tolerance"], 1.0);
      EXPECT_LT(both.json()["bytes_sent"], out.json()["bytes_sent"]);
    }
  }
}

TEST(LayerReplicas, ArePlacedByLoadAndEvenItOut) {
  const std::string skewed =
      "layer --hidden 64 --experts 16 --topk 2 --expert-hidden 32 --tokens 200 --ranks 4 --skew "
      "1.2 ";
  const auto plain = wherry(words(skewed + "--json")).json();
  const Finished done = wherry(words(skewed + "--json --replicas 8"));
  ASSERT_EQ(done.code, 0) << done.err;
  const auto layer = done.json();
  EXPECT_EQ(layer["verified"], true);
  EXPECT_EQ(layer["loads"].size(), 16U);
  EXPECT_EQ(layer["loads"], plain["loads"]);  // the same tokens
  EXPECT_LT(layer["imbalance"], plain["imbalance"]);
  EXPECT_LT(layer["imbalance"], layer["imbalance_before"]);
  const Finished uneven = wherry(words(skewed + "--replicas 3"));
  EXPECT_EQ(uneven.code, 2);
  EXPECT_THAT(uneven.err, HasSubstr("--replicas 4 would do"));
}

TEST(LayerOnCuda, SaysWhyWhereThereIsNoGpu) {
  if (!find_devices().found.empty()) GTEST_SKIP() << "there is a GPU; scripts/gpu_test.sh runs it";
  for (const char* ranks_are : {"--processes", "--threads"}) {
    const Finished done =
        wherry({"layer", "--ranks", "2", "--device", "cuda", "--expert-hidden", "32", ranks_are});
    EXPECT_EQ(done.code, 2);
    EXPECT_EQ(done.out, "");
    EXPECT_THAT(done.err, testing::AnyOf(testing::HasSubstr("no CUDA device can be used"),
                                         testing::HasSubstr("this build has no CUDA")));
  }
}

TEST(LayerText, IsATableAndTheVerdict) {
  const Finished done = wherry(words(std::string(kSmall) + "--ranks 2"));
  ASSERT_EQ(done.code, 0) << done.err;
  EXPECT_THAT(
      done.out,
      AllOf(HasSubstr("stage"), HasSubstr("p99"), HasSubstr("dispatch"), HasSubstr("expert load"),
            HasSubstr("verified 22 of 22 tokens: max error "), HasSubstr("<= tolerance ")));
  EXPECT_THAT(done.out, Not(HasSubstr("\033")));
  EXPECT_EQ(done.err, "");
}

TEST(LayerText, SaysHowWideTheExpertsAreAndWhy) {
  const Finished done = wherry(words("layer --ranks 2 --hidden 64 --experts 4 --topk 2"));
  ASSERT_EQ(done.code, 0) << done.err;
  EXPECT_THAT(
      done.out,
      HasSubstr("expert hidden 2048 (deepseek-v3 has 2048): the weights of all 4 experts take"));
}

}  // namespace
}  // namespace wherry::test
