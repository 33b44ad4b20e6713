// wherry balance: the reference's tables through the command, what moves, and bad files.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <string>

#include "cli/command.hpp"

namespace wherry::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::StartsWith;

std::string file_with(const std::string& name, const std::string& text) {
  std::string path = testing::TempDir() + "wherry_balance_" + std::to_string(getpid()) + name;
  std::ofstream(path) << text;
  return path;
}

const char* const kPublished = R"({"loads": [[90,132,40,61,104,165,39,4,73,56,183,86],)"
                               R"([20,107,104,64,19,197,187,157,172,86,16,27]]})";

Finished balance(const std::string& path, const std::string& more) {
  return wherry(words("balance --loads " + path + " " + more));
}

TEST(BalanceCommand, GivesThePublishedTablesAndWhatFollows) {
  const auto json = balance(file_with("loads", kPublished),
                            "--ranks 8 --nodes 2 --slots 16 --groups 4 --policy reference --json")
                        .json();
  EXPECT_EQ(json["physical_to_logical"][0].dump(), "[5,6,5,7,8,4,3,4,10,9,10,2,0,1,11,1]");
  EXPECT_EQ(json["physical_to_logical"][1].dump(), "[7,10,6,8,6,11,8,9,2,4,5,1,5,0,3,1]");
  EXPECT_EQ(json["replicas"][1].dump(), "[1,2,1,1,1,2,2,1,2,1,1,1]");
  EXPECT_EQ(json["logical_to_physical"][0][5].dump(), "[0,2]");
  EXPECT_EQ(json["rank_loads"][0].dump(), "[121.5,86.5,125.0,113.0,147.5,131.5,156.0,152.0]");
  EXPECT_DOUBLE_EQ(json["imbalance"][0].get<double>(), 156 * 8 / 1033.0);
  EXPECT_EQ(json["moves"].size(), 2U);
}

TEST(BalanceCommand, StartsFromAnEarlierOutputAndMovesNothingWithoutNeed) {
  const std::string loads = file_with("loads", kPublished);
  const std::string shape = "--ranks 8 --nodes 2 --slots 16 --groups 4 --json";
  const Finished first = balance(loads, shape);
  ASSERT_EQ(first.code, 0) << first.err;
  const auto again = balance(loads, shape + " --from " + file_with("from", first.out)).json();
  EXPECT_THAT(again["moves"][0], IsEmpty());
  EXPECT_THAT(again["moves"][1], IsEmpty());
  EXPECT_EQ(again["physical_to_logical"], first.json()["physical_to_logical"]);
  EXPECT_EQ(again["imbalance_before"], first.json()["imbalance"]);
}

TEST(BalanceCommand, ShowsBeforeAndAfterOfEachLayer) {
  const Finished done = balance(file_with("loads", kPublished), "--ranks 4 --slots 16");
  EXPECT_EQ(done.code, 0);
  EXPECT_EQ(done.err, "");
  EXPECT_THAT(done.out, AllOf(HasSubstr("12 experts in 16 slots of 4 ranks"),
                              HasSubstr("max/mean before"), HasSubstr("weights that travel")));
}

struct BadFile {
  const char* title;
  const char* text;
  const char* wrong;
};

void PrintTo(const BadFile& file, std::ostream* out) { *out << file.text; }

class BadLoads : public testing::TestWithParam<BadFile> {};

TEST_P(BadLoads, AreOneSentenceAndExitCodeTwo) {
  const Finished done = balance(file_with(GetParam().title, GetParam().text), "--ranks 2");
  EXPECT_EQ(done.code, 2);
  EXPECT_EQ(done.out, "");
  EXPECT_THAT(done.err, AllOf(StartsWith("wherry: "), HasSubstr(GetParam().wrong)));
  EXPECT_EQ(std::ranges::count(done.err, '\n'), 1) << done.err;
}

INSTANTIATE_TEST_SUITE_P(
    Of, BadLoads,
    testing::Values(
        BadFile{"Empty", "", "is not JSON"}, BadFile{"NoJson", "loads: 1", "is not JSON"},
        BadFile{"NaN", R"({"loads": [[1, NaN]]})", "is not JSON"},
        BadFile{"NoObject", "[1]", R"(must be {"loads": [[...], ...]})"},
        BadFile{"NoLoads", "{}", R"(must be {"loads": [[...], ...]})"},
        BadFile{"NoRow", R"({"loads": [1]})", "it must be a row of numbers"},
        BadFile{"NoLayer", R"({"loads": []})", "at least one row"},
        BadFile{"NoExpert", R"({"loads": [[]]})", "it must have 1..65536"},
        BadFile{"NoNumber", R"({"loads": [[1, "a"]]})", R"(loads[0][1] is "a")"},
        BadFile{"Negative", R"({"loads": [[1, -2]]})", "loads[0][1] is -2; a load must be finite"},
        BadFile{"Ragged", R"({"loads": [[1, 2], [1]]})", "every layer needs the same number"}),
    [](const auto& of) { return std::string(of.param.title); });

TEST(BalanceCommand, SaysWhatWasWrongWithAnyOtherArgument) {
  const std::string loads = file_with("loads", kPublished);
  const auto complaint = [&](const std::string& more) {
    const Finished done = balance(loads, more);
    EXPECT_EQ(done.code, 2) << more;
    EXPECT_EQ(done.out, "");
    return done.err;
  };
  EXPECT_THAT(complaint(""), HasSubstr("--ranks is required"));
  EXPECT_THAT(complaint("--ranks 0"), HasSubstr("'0' is not a whole number from 1"));
  EXPECT_THAT(complaint("--ranks 8 --slots 8"), HasSubstr("12 experts need 12..65536"));
  EXPECT_THAT(complaint("--ranks 8 --slots 15"), HasSubstr("multiple of ranks (8)"));
  EXPECT_THAT(complaint("--ranks 8 --groups 5"), HasSubstr("divide the number of experts (12)"));
  EXPECT_THAT(complaint("--ranks 8 --policy fair"), HasSubstr("best|reference"));
  EXPECT_THAT(complaint("--ranks 8 --from /nowhere"), HasSubstr("cannot read /nowhere: No such"));
  EXPECT_THAT(complaint("--ranks 8 --from /tmp"), HasSubstr("cannot read /tmp: Is a directory"));
  const std::string bad_expert = file_with("from", R"({"physical_to_logical": [[0, 12]]})");
  EXPECT_THAT(complaint("--ranks 2 --from " + bad_expert), HasSubstr("experts are 0..11"));
  const std::string missing = file_with("from", R"({"physical_to_logical": [[0, 1]]})");
  EXPECT_THAT(complaint("--ranks 2 --from " + missing), HasSubstr("expert 2 has no slot"));
}

}  // namespace
}  // namespace wherry::test
