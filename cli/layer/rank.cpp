// One rank of `wherry layer`: makes its experts, runs the steps, verifies the last one.
#include <fmt/format.h>

#include <array>
#include <chrono>
#include <string_view>
#include <vector>

#include "experts/synthetic.hpp"
#include "gather.hpp"
#include "layer/job.hpp"
#include "layer/verify.hpp"
#include "progress.hpp"
#include "report/table.hpp"
#include "routing.hpp"
#include "wherry/wherry.hpp"

namespace wherry::cli {
namespace {

enum Part : std::uint8_t { kPlan, kDispatch, kExperts, kCombine, kParts };

// bf16 rows, tightly packed.
struct Rows {
  Rows(std::int64_t rows, std::int64_t hidden) : values(static_cast<std::size_t>(rows * hidden)) {
    view.data = values.data();
    view.rows = rows;
    view.cols = hidden;
  }
  std::vector<std::uint16_t> values;
  TensorView view;
};

class Rank {
 public:
  Rank(const Group& group, const LayerJob& job, Progress& progress)
      : group_(group),
        job_(job),
        progress_(progress),
        synthetic_{job.routing.seed, job.model.hidden, job.model.expert_hidden},
        mlp_(make_experts()),
        exchange_(group, job.config),
        plan_(exchange_.make_plan()),
        x_(job.tokens, job.model.hidden),
        out_(job.tokens, job.model.hidden) {}

  // Collective: one step, of tokens and routing that no other step has, so that a row left from an
  // earlier step is seen.
  void step(int number);
  [[nodiscard]] LocalVerification verify() const;

  [[nodiscard]] const std::array<double, kParts>& times() const noexcept { return times_; }
  [[nodiscard]] const Exchange& exchange() const noexcept { return exchange_; }
  [[nodiscard]] const GatedMlp& experts() const noexcept { return mlp_; }
  [[nodiscard]] std::int64_t rows_received() const noexcept { return rows_received_; }

 private:
  GatedMlp make_experts() const;
  void run_experts(const Received& received, TensorView y);
  // Microseconds that this rank needs for `work`, once all ranks have met.
  template <typename Work>
  void time(Part part, Work work) {
    group_.barrier();
    const auto begin = std::chrono::steady_clock::now();
    work();
    const auto end = std::chrono::steady_clock::now();
    times_[part] = std::chrono::duration<double, std::micro>(end - begin).count();
  }

  const Group& group_;
  const LayerJob& job_;
  Progress& progress_;
  SyntheticExperts synthetic_;
  GatedMlp mlp_;
  Exchange exchange_;
  Plan plan_;
  Rows x_, out_;
  TokenRouting routing_;
  std::array<double, kParts> times_{};
  std::int64_t rows_received_ = 0;
};

GatedMlp Rank::make_experts() const {
  const auto placement = Placement::contiguous(job_.model.experts, group_.size());
  const auto slots = placement.slot_begin().subspan(static_cast<std::size_t>(group_.rank()), 2);
  const auto mine = placement.slot_to_expert().subspan(
      static_cast<std::size_t>(slots[0]), static_cast<std::size_t>(slots[1] - slots[0]));
  const ExpertsConfig config{.hidden = job_.model.hidden,
                             .expert_hidden = job_.model.expert_hidden,
                             .num_threads = threads_per_rank(group_.size())};
  const WeightSource source = synthetic_.source();
  return {
      config, mine, [&](int expert, Matrix matrix, TensorView weights) {
        progress_.tick(fmt::format("Making the weights of {} experts: {} of {}", job_.model.experts,
                                   (expert - mine[0]) * group_.size(), job_.model.experts));
        source(expert, matrix, weights);
      }};
}

void Rank::run_experts(const Received& received, TensorView y) {
  switch (job_.config.layout) {
    case Layout::grouped:
      mlp_.forward(received.rows, received.slot_begin, received.slot_counts, y);
      return;
    case Layout::tokens: mlp_.forward_gathered(received, y); return;
    case Layout::slots: mlp_.forward_slots(received.rows, received.slot_counts, y); return;
  }
}

void Rank::step(int number) {
  const std::int64_t first = (static_cast<std::int64_t>(number) * group_.size() + group_.rank()) *
                             job_.tokens;  // of the global batch of all steps
  fill_synthetic_tokens(job_.routing.seed, first, x_.view);
  routing_ =
      synthetic_routing(job_.routing, job_.model.experts, job_.model.topk, first, job_.tokens);
  Received received;
  TensorView y;
  time(kPlan, [&] { exchange_.plan(routing_.view(), plan_); });
  time(kDispatch, [&] { received = exchange_.dispatch(plan_, x_.view); });
  time(kExperts, [&] {
    y = exchange_.combine_input(plan_);
    run_experts(received, y);
  });
  time(kCombine, [&] { exchange_.combine(plan_, y, out_.view); });
  rows_received_ = plan_.to_host().rows_received;
}

LocalVerification Rank::verify() const {
  const double flop = reference_flop(synthetic_, job_.global_tokens() * job_.model.topk);
  const auto chosen = tokens_to_verify(group_.size(), group_.rank(), job_.tokens, flop);
  return verify_tokens(synthetic_, chosen, x_.view, routing_.view(), out_.view,
                       threads_per_rank(group_.size()));
}

// What each rank counts of the last step and of its memory.
struct Counts {
  Traffic before, after;
  std::int64_t rows_received;
  std::uint64_t weight_bytes, window_bytes;
};

void add_counts(const std::vector<Counts>& ranks, LayerOutcome& outcome) {
  for (const Counts& rank : ranks) {
    const Traffic& a = rank.before;
    const Traffic& b = rank.after;
    outcome.rows_received += rank.rows_received;
    outcome.dispatch_rows += b.dispatch_rows - a.dispatch_rows;
    outcome.dispatch_bytes += b.dispatch_bytes - a.dispatch_bytes;
    outcome.combine_rows += b.combine_rows - a.combine_rows;
    outcome.combine_bytes += b.combine_bytes - a.combine_bytes;
    outcome.link_bytes +=
        b.dispatch_link_bytes - a.dispatch_link_bytes + b.combine_link_bytes - a.combine_link_bytes;
    outcome.weight_bytes += rank.weight_bytes;
    outcome.window_bytes += rank.window_bytes;
  }
}

void add_verification(const std::vector<LocalVerification>& ranks, std::int64_t tokens,
                      LayerOutcome& outcome) {
  outcome.verified = true;
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    const LocalVerification& local = ranks[rank];
    outcome.verified_tokens += local.tokens;
    outcome.tolerance = local.tolerance;
    const bool worse = !(local.max_error <= outcome.max_error);  // also for a NaN
    if (worse || outcome.worst_token < 0 || (outcome.verified && !local.passed)) {
      outcome.max_error = local.max_error;
      outcome.worst_token = static_cast<std::int64_t>(rank) * tokens + local.worst_token;
      outcome.worst_column = local.worst_column;
    }
    outcome.verified = outcome.verified && local.passed;
  }
}

template <std::size_t N>
void copy_text(std::string_view text, char (&to)[N]) {
  text.copy(to, N - 1);
}

}  // namespace

void run_layer_rank(const Group& group, const LayerJob& job, LayerOutcome& outcome) {
  Progress progress(group.rank() == 0);
  Rank rank(group, job, progress);
  const int warm = job.config.depth;  // every generation once
  std::vector<double> times;          // [steps, parts]
  Counts counts{};
  for (int number = 0; number < warm + job.steps; ++number) {
    progress.tick(number < warm ? std::string("Warming up")
                                : fmt::format("Step {} of {}", number - warm + 1, job.steps));
    counts.before = rank.exchange().traffic();
    rank.step(number);
    if (number >= warm) times.insert(times.end(), rank.times().begin(), rank.times().end());
  }
  counts.after = rank.exchange().traffic();
  counts.rows_received = rank.rows_received();
  counts.weight_bytes = rank.experts().weight_bytes();
  counts.window_bytes = rank.exchange().window_bytes();
  progress.show("Verifying");
  const auto all_counts = gather(group, counts);
  const auto all_times = slowest(group, times);
  const auto verified = gather(group, rank.verify());
  if (group.rank() != 0) return;

  const auto part = [&](Part p) {
    std::vector<double> samples;
    for (std::size_t i = p; i < all_times.size(); i += kParts) samples.push_back(all_times[i]);
    return percentiles(std::move(samples));
  };
  outcome.plan = part(kPlan);
  outcome.dispatch = part(kDispatch);
  outcome.experts = part(kExperts);
  outcome.combine = part(kCombine);
  add_counts(all_counts, outcome);
  add_verification(verified, job.tokens, outcome);
  copy_text(rank.exchange().kernels(), outcome.kernels);
  copy_text(rank.exchange().fabric(), outcome.fabric);
  copy_text(rank.experts().implementation().name, outcome.experts_by);
}

}  // namespace wherry::cli
