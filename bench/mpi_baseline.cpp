// The same work over MPI_Alltoallv, as one would write it without Wherry: what `make bench` compares
// with. Run it under mpirun; rank 0 prints one JSON object.
//
//   plan      count rows for each rank, exchange the counts
//   dispatch  pack rows by rank, alltoallv, put the received rows in order of expert
//   experts   identity: one copy, not timed
//   combine   back to order of arrival, alltoallv, weighted sum
//
// A row travels once per (token, k), and the weighted sum is taken at home; with --dedup once per
// (token, rank), and what a rank has of a token is summed there, as Wherry's by_rank does. Results
// are compared bit for bit with the dense reference, and time is taken as bench/measure.hpp takes it.
#include <fmt/format.h>
#include <mpi.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstring>
#include <nlohmann/json.hpp>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "workload.hpp"

namespace wherry::bench {
namespace {

struct Options {
  Shape shape;
  bool dedup = false;
  int steps = 30;
  int warmup = 5;
};

std::size_t size(std::int64_t value) { return static_cast<std::size_t>(value); }

std::int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// acc += weight * row
void add_row(std::span<float> acc, const std::uint16_t* row, float weight) {
  for (std::size_t h = 0; h < acc.size(); ++h) acc[h] += weight * widen(row[h]);
}

void store_row(std::uint16_t* row, std::span<const float> acc) {
  for (std::size_t h = 0; h < acc.size(); ++h) row[h] = narrow(acc[h]);
}

// Rows to or from every rank: how many, and where those of each rank begin, [ranks + 1].
struct Parts {
  explicit Parts(int ranks) : counts(size(ranks)), begin(size(ranks) + 1) {}
  void place() { std::partial_sum(counts.begin(), counts.end(), begin.begin() + 1); }
  [[nodiscard]] int rows() const { return begin.back(); }

  std::vector<int> counts, begin;
};

// One row's worth of an element type, so that counts are rows.
class RowType {
 public:
  RowType(int elements, MPI_Datatype element) {
    MPI_Type_contiguous(elements, element, &type_);
    MPI_Type_commit(&type_);
  }
  ~RowType() { MPI_Type_free(&type_); }
  RowType(const RowType&) = delete;
  RowType& operator=(const RowType&) = delete;

  void exchange(const void* from, const Parts& send, void* to, const Parts& receive) const {
    MPI_Alltoallv(from, send.counts.data(), send.begin.data(), type_, to, receive.counts.data(),
                  receive.begin.data(), type_, MPI_COMM_WORLD);
  }

 private:
  MPI_Datatype type_ = MPI_DATATYPE_NULL;
};

class Baseline {
 public:
  Baseline(const Options& options, int rank);

  void plan();
  void dispatch();
  void run_experts() {
    std::copy_n(grouped_.data(), size(num_grouped_) * hidden_, results_.data());
  }
  void combine();

  // The first element of the output that is wrong, or an empty text.
  [[nodiscard]] std::string check() const;
  [[nodiscard]] std::int64_t rows_sent() const { return send_.rows(); }

 private:
  // One choice of a row: the local expert, or -1 where the choice went elsewhere.
  struct Choice {
    std::int32_t expert;
    float weight;
  };
  void pack();
  void group_by_expert();
  void ungroup();
  void sum_at_home();
  [[nodiscard]] std::uint16_t* row(std::vector<std::uint16_t>& rows, std::int64_t at) const {
    return rows.data() + size(at) * hidden_;
  }

  Shape shape_;
  bool dedup_;
  int ranks_, topk_, choices_per_row_;
  std::size_t hidden_;
  int first_expert_ = 0, num_experts_ = 0;  // of this rank
  Workload work_;
  RowType row_type_, choices_type_;

  Parts send_, receive_;
  std::vector<int> row_of_choice_;  // where each (token, k) was packed, [tokens, topk]
  std::vector<int> row_on_rank_;    // dedup: where the token was packed for a rank, or -1
  std::vector<Choice> packed_choices_, arrived_choices_;
  std::vector<int> position_;  // among the grouped rows, of each choice of an arrived row; or -1
  int num_grouped_ = 0;
  std::vector<std::uint16_t> packed_, arrived_, grouped_, results_, returning_, returned_, out_;
};

Baseline::Baseline(const Options& options, int rank)
    : shape_(options.shape),
      dedup_(options.dedup),
      ranks_(shape_.ranks),
      topk_(shape_.topk),
      choices_per_row_(dedup_ ? topk_ : 1),
      hidden_(size(shape_.hidden)),
      work_(make_workload(shape_, rank)),
      row_type_(static_cast<int>(shape_.hidden), MPI_UINT16_T),
      choices_type_(choices_per_row_ * static_cast<int>(sizeof(Choice)), MPI_BYTE),
      send_(ranks_),
      receive_(ranks_),
      row_of_choice_(work_.ids.size()),
      row_on_rank_(size(shape_.tokens * ranks_)),
      out_(size(shape_.tokens) * hidden_) {
  for (int expert = 0; expert < shape_.experts; ++expert) {
    if (shape_.rank_of(expert) != rank) continue;
    if (num_experts_++ == 0) first_expert_ = expert;
  }
}

void Baseline::plan() {
  std::ranges::fill(send_.counts, 0);
  std::vector<std::int64_t> last_token(size(ranks_), -1);  // that was counted for the rank
  for (std::int64_t token = 0; token < shape_.tokens; ++token) {
    for (int k = 0; k < topk_; ++k) {
      const auto peer = size(shape_.rank_of(work_.ids[size(token * topk_ + k)]));
      if (dedup_ && last_token[peer] == token) continue;
      last_token[peer] = token;
      ++send_.counts[peer];
    }
  }
  MPI_Alltoall(send_.counts.data(), 1, MPI_INT, receive_.counts.data(), 1, MPI_INT, MPI_COMM_WORLD);
  send_.place();
  receive_.place();
}

void Baseline::dispatch() {
  pack();
  arrived_choices_.resize(size(receive_.rows()) * size(choices_per_row_));
  arrived_.resize(size(receive_.rows()) * hidden_);
  choices_type_.exchange(packed_choices_.data(), send_, arrived_choices_.data(), receive_);
  row_type_.exchange(packed_.data(), send_, arrived_.data(), receive_);
  group_by_expert();
}

void Baseline::pack() {
  packed_.resize(size(send_.rows()) * hidden_);
  packed_choices_.assign(size(send_.rows()) * size(choices_per_row_), Choice{-1, 0.0F});
  std::ranges::fill(row_on_rank_, -1);
  std::vector<int> next(send_.begin.begin(), send_.begin.end() - 1);
  for (std::int64_t token = 0; token < shape_.tokens; ++token) {
    for (int k = 0; k < topk_; ++k) {
      const std::size_t at = size(token * topk_ + k);
      const int peer = shape_.rank_of(work_.ids[at]);
      int& known = row_on_rank_[size(token * ranks_ + peer)];
      if (!dedup_ || known < 0) {
        known = next[size(peer)]++;
        std::copy_n(work_.x.row(token), hidden_, row(packed_, known));
      }
      row_of_choice_[at] = known;
      const int choice = known * choices_per_row_ + (dedup_ ? k : 0);
      packed_choices_[size(choice)] = {work_.ids[at], work_.weights[at]};
    }
  }
}

void Baseline::group_by_expert() {
  std::vector<int> next(size(num_experts_) + 1, 0);
  for (const Choice& choice : arrived_choices_) {
    if (choice.expert >= 0) ++next[size(choice.expert - first_expert_) + 1];
  }
  std::partial_sum(next.begin(), next.end(), next.begin());
  num_grouped_ = next.back();
  grouped_.resize(size(num_grouped_) * hidden_);
  results_.resize(grouped_.size());
  position_.assign(arrived_choices_.size(), -1);
  for (std::size_t i = 0; i < arrived_choices_.size(); ++i) {
    if (arrived_choices_[i].expert < 0) continue;
    position_[i] = next[size(arrived_choices_[i].expert - first_expert_)]++;
    const auto from = static_cast<std::int64_t>(i) / choices_per_row_;
    std::copy_n(row(arrived_, from), hidden_, row(grouped_, position_[i]));
  }
}

void Baseline::combine() {
  ungroup();
  returned_.resize(packed_.size());
  row_type_.exchange(returning_.data(), receive_, returned_.data(), send_);
  sum_at_home();
}

void Baseline::ungroup() {
  returning_.resize(arrived_.size());
  std::vector<float> acc(hidden_);
  for (int to = 0; to < receive_.rows(); ++to) {
    const std::size_t first = size(to) * size(choices_per_row_);
    if (!dedup_) {
      std::copy_n(row(results_, position_[first]), hidden_, row(returning_, to));
      continue;
    }
    std::ranges::fill(acc, 0.0F);
    for (std::size_t i = first; i < first + size(topk_); ++i) {
      if (position_[i] >= 0) add_row(acc, row(results_, position_[i]), arrived_choices_[i].weight);
    }
    store_row(row(returning_, to), acc);
  }
}

void Baseline::sum_at_home() {
  std::vector<float> acc(hidden_);
  for (std::int64_t token = 0; token < shape_.tokens; ++token) {
    std::ranges::fill(acc, 0.0F);
    if (dedup_) {
      for (int peer = 0; peer < ranks_; ++peer) {
        const int at = row_on_rank_[size(token * ranks_ + peer)];
        if (at >= 0) add_row(acc, row(returned_, at), 1.0F);
      }
    } else {
      for (std::size_t at = size(token * topk_); at < size((token + 1) * topk_); ++at)
        add_row(acc, row(returned_, row_of_choice_[at]), work_.weights[at]);
    }
    store_row(row(out_, token), acc);
  }
}

std::string Baseline::check() const {
  const Sum sum = dedup_ ? Sum::by_rank : Sum::by_token;
  for (std::int64_t token = 0; token < shape_.tokens; ++token) {
    const auto want = dense_token(shape_, work_, Experts::identity, sum, token);
    const std::uint16_t* const got = out_.data() + size(token) * hidden_;
    for (std::size_t h = 0; h < hidden_; ++h) {
      if (got[h] != want[h]) {
        return fmt::format("token {}, column {}: expected {}, got {}", token, h, widen(want[h]),
                           widen(got[h]));
      }
    }
  }
  return {};
}

// --- Timing -------------------------------------------------------------------------------------

struct Times {
  std::int64_t begin, planned, dispatched, combine_begin, combined, experts;
};

Times run_step(Baseline& baseline) {
  Times t{};
  MPI_Barrier(MPI_COMM_WORLD);
  t.begin = now_ns();
  baseline.plan();
  t.planned = now_ns();
  baseline.dispatch();
  t.dispatched = now_ns();
  MPI_Barrier(MPI_COMM_WORLD);
  const std::int64_t experts_begin = now_ns();
  baseline.run_experts();
  t.experts = now_ns() - experts_begin;
  MPI_Barrier(MPI_COMM_WORLD);
  t.combine_begin = now_ns();
  baseline.combine();
  t.combined = now_ns();
  return t;
}

std::int64_t reduce(std::int64_t mine, MPI_Op op) {
  std::int64_t result = 0;
  MPI_Allreduce(&mine, &result, 1, MPI_INT64_T, op, MPI_COMM_WORLD);
  return result;
}

double to_us(std::int64_t nanoseconds) { return static_cast<double>(nanoseconds) / 1000.0; }

// Microseconds of every step; in each the slowest rank counts.
struct Series {
  std::vector<double> plan, dispatch, experts, combine, total;

  void add(const Times& t) {
    const auto slowest = [](std::int64_t duration) { return to_us(reduce(duration, MPI_MAX)); };
    const auto span = [](std::int64_t begin, std::int64_t end) {
      return to_us(reduce(end, MPI_MAX) - reduce(begin, MPI_MIN));
    };
    plan.push_back(slowest(t.planned - t.begin));
    dispatch.push_back(slowest(t.dispatched - t.planned));
    experts.push_back(slowest(t.experts));
    combine.push_back(slowest(t.combined - t.combine_begin));
    total.push_back(span(t.begin, t.dispatched) + span(t.combine_begin, t.combined));
  }
};

double quantile(std::vector<double> values, double q) {
  std::ranges::sort(values);
  return values[size(std::lround(q * static_cast<double>(values.size() - 1)))];
}

void print(const Options& options, const Series& series, std::int64_t bytes) {
  char version[MPI_MAX_LIBRARY_VERSION_STRING] = {};
  int length = 0;
  MPI_Get_library_version(version, &length);
  nlohmann::ordered_json o;
  o["command"] = "mpi_baseline";
  o["mpi"] = std::string(version, size(length)).substr(0, std::string(version).find(','));
  o["ranks"] = options.shape.ranks;
  o["tokens"] = options.shape.tokens;
  o["hidden"] = options.shape.hidden;
  o["topk"] = options.shape.topk;
  o["experts"] = options.shape.experts;
  o["dedup"] = options.dedup;
  o["steps"] = options.steps;
  o["seed"] = options.shape.seed;
  o["verified"] = true;
  const auto quantiles = [&](double q) {
    return nlohmann::ordered_json{{"plan_us", quantile(series.plan, q)},
                                  {"dispatch_us", quantile(series.dispatch, q)},
                                  {"experts_us", quantile(series.experts, q)},
                                  {"combine_us", quantile(series.combine, q)},
                                  {"total_us", quantile(series.total, q)}};
  };
  o["p50"] = quantiles(0.5);
  o["p99"] = quantiles(0.99);
  for (const char* const field : {"plan_us", "dispatch_us", "combine_us", "total_us"})
    o[field] = o["p50"][field];
  o["bytes"] = bytes;
  fmt::print("{}\n", o.dump());
}

int run(const Options& options, int rank) {
  Baseline baseline(options, rank);
  for (int i = 0; i < options.warmup; ++i) static_cast<void>(run_step(baseline));
  std::vector<Times> times(size(options.steps));
  for (Times& t : times) t = run_step(baseline);
  const std::string problem = baseline.check();
  if (!problem.empty()) fmt::print(stderr, "mpi_baseline: rank {}: {}\n", rank, problem);
  if (reduce(problem.empty() ? 0 : 1, MPI_MAX) != 0) return 1;
  Series series;
  for (const Times& t : times) series.add(t);
  const std::int64_t bytes = 2 * options.shape.row_bytes() * reduce(baseline.rows_sent(), MPI_SUM);
  if (rank == 0) print(options, series, bytes);
  return 0;
}

}  // namespace
}  // namespace wherry::bench

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank = 0;
  wherry::bench::Options options;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &options.shape.ranks);
  CLI::App app("Dispatch and combine over MPI_Alltoallv; start it with mpirun.", "mpi_baseline");
  app.add_option("--tokens", options.shape.tokens, "Tokens a rank")->check(CLI::PositiveNumber);
  app.add_option("--hidden", options.shape.hidden, "Elements of a token, in bf16")
      ->check(CLI::Range(1, 1 << 20));
  app.add_option("--experts", options.shape.experts, "Experts of all ranks")
      ->check(CLI::Range(options.shape.ranks, 1 << 20));
  app.add_option("--topk", options.shape.topk, "Experts a token chooses")->check(CLI::Range(1, 64));
  app.add_option("--seed", options.shape.seed, "Of tokens, routing and weights");
  app.add_option("--steps", options.steps, "Timed steps")->check(CLI::Range(1, 1000000));
  app.add_option("--warmup", options.warmup, "Steps before them")->check(CLI::Range(0, 1000000));
  app.add_flag("--dedup", options.dedup, "One copy per (token, rank)");
  int status = 0;
  try {
    app.parse(argc, argv);
    status = wherry::bench::run(options, rank);
  } catch (const CLI::ParseError& error) {
    status = rank == 0 ? app.exit(error) : error.get_exit_code();
  }
  MPI_Finalize();
  return status;
}
