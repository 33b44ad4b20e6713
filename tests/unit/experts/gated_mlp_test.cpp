// GatedMlp, every implementation: the values, the rows it may touch, what its bits depend on.
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <numeric>

#include "experts/reference.hpp"
#include "unit/experts/cases.hpp"

namespace wherry::test {
namespace {

using ::testing::HasSubstr;

std::vector<int> first_experts(int count) {
  std::vector<int> experts(static_cast<std::size_t>(count));
  std::iota(experts.begin(), experts.end(), 0);
  return experts;
}

// A layer of one choice of weight 1 for each row: its error is the MLP's.
Comparison compare_with_oracle(const SyntheticExperts& experts, int expert, const Rows& x,
                               const Rows& y) {
  const std::int64_t rows = x.view().rows;
  const std::vector<std::int32_t> ids(static_cast<std::size_t>(rows), expert);
  const Routing routing(ids.data(), nullptr, rows, 1);
  Expected expected = dense_reference(experts, x.view(), routing);
  for (std::int64_t row = 0; row < rows; ++row) {
    std::vector<double> input;
    input.reserve(static_cast<std::size_t>(experts.hidden));
    for (std::int64_t c = 0; c < experts.hidden; ++c) {
      input.push_back(static_cast<double>(x.at(row, c)));
    }
    const std::vector<double> result = mlp_oracle(experts, expert, input);
    std::copy(result.begin(), result.end(), expected.y.begin() + row * experts.hidden);
  }
  return compare(experts, expected, y.view());
}

struct Shape {
  std::int64_t hidden, expert_hidden;
};
constexpr Shape kShapes[] = {{1, 1},   {7, 5},    {8, 3},     {33, 65},   {64, 64},
                             {97, 31}, {512, 96}, {130, 600}, {1025, 33}, {2880, 70}};

TEST_P(GatedMlpTest, EqualsTheOracleForOddAndEvenShapes) {
  for (const auto& [hidden, expert_hidden] : kShapes) {
    const SyntheticExperts experts{.seed = 3, .hidden = hidden, .expert_hidden = expert_hidden};
    const std::vector<int> local = {5, 2};
    GatedMlp mlp(config(experts), local, experts.source());
    const std::int64_t rows = 37;
    const Rows x(dtype(), rows, hidden), y(dtype(), rows, hidden);
    fill_synthetic_tokens(9, 100, x.view());
    for (std::size_t slot = 0; slot < local.size(); ++slot) {
      std::vector<std::int64_t> begin = {0, 0}, counts = {0, 0};
      counts[slot] = rows;
      mlp.forward(x.view(), begin, counts, y.view());
      const Comparison c = compare_with_oracle(experts, local[slot], x, y);
      EXPECT_TRUE(c.passed) << "hidden " << hidden << ", expert hidden " << expert_hidden
                            << ", slot " << slot << ": error " << c.max_error << " > "
                            << c.tolerance << " at row " << c.worst_token << ", column "
                            << c.worst_column;
      const Comparison other = compare_with_oracle(experts, local[1 - slot], x, y);
      EXPECT_GT(other.max_error, 10 * other.tolerance) << "the experts do not differ";
    }
  }
}

TEST_P(GatedMlpTest, ARowDoesNotDependOnHowManyStandBesideIt) {
  for (const auto& [hidden, expert_hidden] : {Shape{7168, 96}, Shape{200, 2048}, Shape{33, 65}}) {
    const SyntheticExperts experts{.seed = 4, .hidden = hidden, .expert_hidden = expert_hidden};
    GatedMlp mlp(config(experts), first_experts(1), experts.source());
    const std::int64_t rows = 600;
    const Rows x(dtype(), rows, hidden), y(dtype(), rows, hidden);
    fill_synthetic_tokens(1, 0, x.view());
    const std::vector<std::int64_t> begin = {0};
    // Enough neighbours to fill a block and go on; `plain` is slow, and simple.
    const std::int64_t most = GetParam().implementation == std::string("plain") ? 40 : rows;
    mlp.forward(x.view(), begin, std::vector<std::int64_t>{most}, y.view());
    for (const std::int64_t count : {1, 2, 3, 15, 16, 17, 31, 32, 33, 40, 64, 100, 512, 513}) {
      if (count > most) break;
      const std::int64_t first = most - count;  // another place in its block, too
      const Rows part(dtype(), rows, hidden);
      mlp.forward(x.view(), std::vector<std::int64_t>{first}, std::vector<std::int64_t>{count},
                  part.view());
      for (std::int64_t row = first; row < most; row += std::max<std::int64_t>(1, count / 9)) {
        ASSERT_EQ(part.row(row), y.row(row))
            << "row " << row << " of " << count << " rows, hidden " << hidden;
      }
    }
  }
}

TEST_P(GatedMlpTest, TouchesOnlyTheRowsOfTheSlots) {
  const SyntheticExperts experts{.seed = 5, .hidden = 40, .expert_hidden = 24};
  GatedMlp mlp(config(experts), first_experts(5), experts.source());
  // Segments padded to 8 rows; slots 1 and 4 are empty.
  const std::vector<std::int64_t> counts = {3, 0, 8, 1, 0}, begin = {0, 8, 8, 16, 24, 24};
  for (const std::int64_t extra : {0, 12}) {  // rows that are tight, and rows that are not
    const Rows x(dtype(), 24, 40, extra), y(dtype(), 24, 40, extra);
    fill_synthetic_tokens(1, 0, x.view());
    mlp.forward(x.view(), begin, counts, y.view());
    for (std::size_t slot = 0; slot < counts.size(); ++slot) {
      for (std::int64_t row = begin[slot]; row < begin[slot + 1]; ++row) {
        EXPECT_EQ(y.untouched(row), row >= begin[slot] + counts[slot]) << "row " << row;
      }
    }
  }
}

TEST_P(GatedMlpTest, PitchAndThreadsDoNotChangeTheBits) {
  const SyntheticExperts experts{.seed = 6, .hidden = 300, .expert_hidden = 1100};
  const Rows x(dtype(), 70, 300), wide(dtype(), 70, 300, 20);
  fill_synthetic_tokens(1, 0, x.view());
  fill_synthetic_tokens(1, 0, wide.view());
  const std::vector<std::int64_t> counts = {33, 37}, begin = {0, 33};
  const Rows expected(dtype(), 70, 300);
  GatedMlp(config(experts), first_experts(2), experts.source())
      .forward(x.view(), begin, counts, expected.view());
  for (const int num_threads : {1, 2, 5, 40}) {
    GatedMlp mlp(config(experts, num_threads), first_experts(2), experts.source());
    const Rows y(dtype(), 70, 300, 4);
    mlp.forward(wide.view(), begin, counts, y.view());
    for (std::int64_t row = 0; row < 70; ++row) {
      ASSERT_EQ(y.row(row), expected.row(row))
          << "row " << row << ", " << num_threads << " threads";
    }
  }
}

TEST_P(GatedMlpTest, SlotsEqualGrouped) {
  const SyntheticExperts experts{.seed = 7, .hidden = 48, .expert_hidden = 40};
  GatedMlp mlp(config(experts), first_experts(3), experts.source());
  const Rows x(dtype(), 30, 48), y(dtype(), 30, 48), expected(dtype(), 30, 48);
  fill_synthetic_tokens(1, 0, x.view());
  const std::vector<std::int64_t> counts = {10, 0, 4}, begin = {0, 10, 20};
  mlp.forward(x.view(), begin, counts, expected.view());
  mlp.forward_slots(x.view(), counts, y.view());
  for (std::int64_t row = 0; row < 30; ++row) EXPECT_EQ(y.row(row), expected.row(row));
}

TEST_P(GatedMlpTest, WorksWithoutSlotsAndWithoutRows) {
  const SyntheticExperts experts{.seed = 8, .hidden = 16, .expert_hidden = 16};
  const Rows none(dtype(), 0, 16);
  GatedMlp(config(experts), {}, experts.source()).forward(none.view(), {}, {}, none.view());
  GatedMlp mlp(config(experts), first_experts(2), experts.source());
  const std::vector<std::int64_t> zero = {0, 0};
  mlp.forward(none.view(), zero, zero, none.view());
  mlp.forward_slots(none.view(), zero, none.view());
  mlp.forward_gathered(received_tokens(none.view(), zero, zero), none.view());
}

TEST_P(GatedMlpTest, AsksForEachMatrixOfEachExpertOnce) {
  const SyntheticExperts experts{.seed = 9, .hidden = 20, .expert_hidden = 10};
  std::vector<std::string> asked;
  const std::vector<int> local = {4, 1};
  const GatedMlp mlp(config(experts), local, [&](int expert, Matrix matrix, TensorView weights) {
    asked.push_back(std::to_string(expert) + " " + std::string(name(matrix)));
    EXPECT_EQ(weights.dtype, dtype());
    EXPECT_EQ(weights.rows, experts.rows(matrix));
    EXPECT_EQ(weights.cols, experts.cols(matrix));
    EXPECT_EQ(weights.pitch(), weights.row_bytes());
    experts.source()(expert, matrix, weights);
  });
  EXPECT_THAT(asked,
              ::testing::ElementsAre("4 gate", "4 up", "4 down", "1 gate", "1 up", "1 down"));
  EXPECT_EQ(mlp.num_slots(), 2);
  EXPECT_EQ(mlp.implementation().name, GetParam().implementation);
  EXPECT_FALSE(mlp.implementation().reason.empty());
}

// oneDNN runs on one thread here, so it starts none that a fork would lose.
TEST_P(GatedMlpTest, WorksInAForkedChildThoughTheParentHasUsedIt) {
  const SyntheticExperts experts{.seed = 10, .hidden = 64, .expert_hidden = 64};
  const Rows x(dtype(), 4, 64), y(dtype(), 4, 64), again(dtype(), 4, 64);
  fill_synthetic_tokens(1, 0, x.view());
  const std::vector<std::int64_t> begin = {0}, counts = {4};
  const auto run = [&](const Rows& out) {
    GatedMlp mlp(config(experts), first_experts(1), experts.source());
    mlp.forward(x.view(), begin, counts, out.view());
  };
  run(y);
  const pid_t child = fork();
  if (child == 0) {
    alarm(30);
    run(again);
    _exit(again.row(3) == y.row(3) ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "status " << status;
}

TEST_P(GatedMlpTest, SaysWhatIsWrongWithTheRows) {
  const SyntheticExperts experts{.seed = 11, .hidden = 16, .expert_hidden = 16};
  GatedMlp mlp(config(experts), first_experts(2), experts.source());
  const Rows x(dtype(), 8, 16), narrow(dtype(), 8, 15);
  const std::vector<std::int64_t> begin = {0, 4}, counts = {4, 5}, one = {1}, fits = {4, 4};
  const auto message = [&](const auto& call) -> std::string {
    try {
      call();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::bad_argument);
      return error.what();
    }
    return "no error";
  };
  EXPECT_THAT(message([&] { mlp.forward(x.view(), begin, counts, x.view()); }),
              HasSubstr("slot 1 has 5 rows from row 4 on, but there are 8 rows"));
  EXPECT_THAT(message([&] { mlp.forward(x.view(), begin, one, x.view()); }),
              HasSubstr("there are 2 slots"));
  EXPECT_THAT(message([&] { mlp.forward(narrow.view(), begin, fits, x.view()); }),
              HasSubstr("rows is [8, 15]"));
  EXPECT_THAT(message([&] { mlp.forward_slots(x.view(), counts, x.view()); }),
              HasSubstr("slot 1 has 5 rows; it holds 4"));
}

}  // namespace
}  // namespace wherry::test
