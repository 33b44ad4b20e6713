// Bad use: one sentence on stderr that says what was wrong and what is allowed, exit code 2, nothing
// on stdout.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "cli/command.hpp"

namespace wherry::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::StartsWith;

struct Case {
  const char* title;
  const char* arguments;
  const char* wrong;    // what the sentence names
  const char* allowed;  // and what it says instead
};

void PrintTo(const Case& c, std::ostream* out) { *out << c.arguments; }

class BadUse : public testing::TestWithParam<Case> {};

TEST_P(BadUse, IsOneSentenceThatSaysWhatIsAllowed) {
  const Finished done = wherry(words(GetParam().arguments));
  EXPECT_EQ(done.code, 2);
  EXPECT_EQ(done.out, "");
  EXPECT_THAT(done.err, AllOf(StartsWith("wherry: "), HasSubstr(GetParam().wrong),
                              HasSubstr(GetParam().allowed)));
  EXPECT_EQ(std::ranges::count(done.err, '\n'), 1) << done.err;
  EXPECT_LT(done.seconds, 5.0);  // before any weight is made
}

INSTANTIATE_TEST_SUITE_P(
    Of, BadUse,
    testing::Values(
        Case{"NoCommand", "", "no command", "info, layer"},
        Case{"UnknownCommand", "fly", "fly", "info, layer"},
        Case{"FlagBeforeCommand", "--json layer", "--json", "come after it"},
        Case{"UnknownFlag", "layer --wings 2", "--wings", "wherry layer --help"},
        Case{"StrayWord", "layer deepseek-v3", "deepseek-v3", "wherry layer --help"},
        Case{"NoRanks", "layer --ranks 0", "--ranks: '0'", "from 1 to 1024"},
        Case{"RanksInWords", "layer --ranks four", "'four'", "whole number from 1 to 1024"},
        Case{"HalfANumber", "layer --tokens 64k", "'64k'", "whole number from 1"},
        Case{"MissingValue", "layer --tokens", "--tokens", "one value"},
        Case{"ValueTwice", "layer --ranks 2 --ranks 3", "--ranks", "one value"},
        Case{"NegativeDeadline", "layer --deadline -1", "'-1'", "from 0.001"},
        Case{"SkewNotANumber", "layer --skew nan", "'nan'", "from 0 to 10"},
        Case{"TopkOverExperts", "layer --topk 9 --experts 8", "--topk 9", "may be 1 to 8"},
        Case{"TopkOverModel", "layer --model mixtral-8x7b --topk 9", "--topk 9", "may be 1 to 8"},
        Case{"UnknownModel", "layer --model gpt", "'gpt'", "deepseek-v3"},
        Case{"UnknownLayout", "layer --layout rows", "'rows'", "grouped|tokens|slots"},
        Case{"UnknownKernels", "layer --kernels best", "'best'", "reference"},
        Case{"TokensByToken", "layer --layout tokens --reduction by_token", "tokens", "by_rank"},
        Case{"UnknownDevice", "layer --device gpu", "'gpu'", "cpu|cuda"},
        Case{"DeviceOfACommandWithoutOne", "info --device cuda", "--device", "info --help"},
        Case{"HalvesOnGpus", "bench --device cuda --halves", "--halves", "--device cpu"},
        Case{"WireOnGpus", "bench --device cuda --wire nvfp4", "nvfp4", "same or e4m3_block128"},
        Case{"StepsOnGpus", "bench --device cuda --steps 1001", "1001", "1 to 1000"},
        Case{"MultiprocessorsOnCpu", "bench --num-sms 4", "--num-sms", "--device cuda"},
        Case{"ThreadsAndProcesses", "layer --threads --processes", "--threads", "excludes"},
        Case{"NoMemoryForWeights", "layer --expert-hidden 1000000", "--expert-hidden 1000000",
             "would fit"},
        Case{"NoMemoryForWindows", "layer --layout slots --tokens 4000000 --expert-hidden 1",
             "windows of 4 ranks", "fewer --tokens"},
        Case{"MoreThanAnyAddress",
             "layer --ranks 1024 --tokens 16777216 --topk 64 --hidden 1048576 --depth 16",
             "max_tokens", "with 1024 ranks it must lie in 1..2097151"}),
    [](const auto& test) { return std::string(test.param.title); });

TEST(Help, IsNoMistake) {
  for (const char* arguments : {"--help", "layer --help", "info --help", "--version"}) {
    const Finished done = wherry(words(arguments));
    EXPECT_EQ(done.code, 0) << arguments;
    EXPECT_THAT(done.out, HasSubstr(arguments == std::string("--version") ? "wherry " : "--help"));
    EXPECT_EQ(done.err, "") << arguments;
  }
}

TEST(Output, ThatCannotBeWrittenIsAFailure) {
  for (const char* arguments :
       {"info", "info --json", "--help",
        "layer --ranks 2 --hidden 8 --experts 4 --topk 2 --expert-hidden 4 --json"}) {
    const Finished done = wherry(words(arguments), "/dev/full");
    EXPECT_EQ(done.code, 1) << arguments;
    EXPECT_THAT(done.err, HasSubstr("stdout could not be written: No space left")) << arguments;
  }
}

TEST(Info, SaysWhatIsThereAndWhyNotTheRest) {
  const Finished done = wherry({"info", "--json"});
  ASSERT_EQ(done.code, 0) << done.err;
  const auto info = done.json();
  EXPECT_EQ(info["command"], "info");
  for (const char* field : {"version", "commit", "compiler", "cores", "memory_bytes",
                            "available_memory_bytes", "cpu_features", "kernels", "models"}) {
    EXPECT_TRUE(info.contains(field)) << field;
  }
  EXPECT_EQ(info["kernels"].back(), "reference");
  EXPECT_LE(info["available_memory_bytes"], info["memory_bytes"]);
  for (const auto& option : info["options"]) EXPECT_NE(option["reason"], "") << option;
  for (const auto& fabric : info["fabrics"]) EXPECT_NE(fabric["reason"], "") << fabric;
  const Finished text = wherry({"info"});
  EXPECT_EQ(text.code, 0);
  EXPECT_THAT(text.out, AllOf(HasSubstr("WHERRY_CUDA"), HasSubstr("shm"), HasSubstr("kimi-k2")));
}

}  // namespace
}  // namespace wherry::test
