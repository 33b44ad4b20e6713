// One rank of `wherry layer`: makes its experts, runs the steps, verifies the last one.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <string_view>
#include <vector>

#include "experts/synthetic.hpp"
#include "format/round_trip.hpp"
#include "gather.hpp"
#include "kernels/numerics.hpp"
#include "layer/job.hpp"
#include "layer/verify.hpp"
#include "progress.hpp"
#include "report/table.hpp"
#include "routing.hpp"
#include "support/mirrored.hpp"
#include "wherry/wherry.hpp"

namespace wherry::cli {
namespace {

enum Part : std::uint8_t { kPlan, kDispatch, kExperts, kCombine, kParts };

// bf16 rows, tightly packed.
struct Rows {
  Rows(Device on, std::int64_t count, std::int64_t columns) : memory(on), hidden(columns) {
    resize(count);
  }
  void resize(std::int64_t to) {
    rows = to;
    memory.resize(static_cast<std::size_t>(to * hidden) * sizeof(std::uint16_t));
  }
  [[nodiscard]] TensorView view(std::byte* data) const noexcept {
    TensorView view;
    view.data = data;
    view.rows = rows;
    view.cols = hidden;
    return view;
  }
  [[nodiscard]] TensorView host() const noexcept { return view(memory.host()); }
  [[nodiscard]] TensorView device() const noexcept { return view(memory.device()); }

  MirroredMemory memory;
  std::int64_t rows = 0, hidden;
};

class Rank {
 public:
  Rank(const Group& group, const LayerJob& job, Progress& progress)
      : group_(group),
        job_(job),
        progress_(progress),
        synthetic_{job.routing.seed, job.model.hidden, job.model.expert_hidden},
        dispatch_wire_(wire_format(job.config.dispatch_wire, DType::bf16, job.model.hidden)),
        combine_wire_(wire_format(job.config.combine_wire, DType::bf16, job.model.hidden)),
        device_(device_of(job.launch, group)),
        exchange_(group, device_, job.config),
        plan_(exchange_.make_plan()),
        imbalance_before_(place_by_load()),
        mlp_(make_experts()),
        x_(device_, job.tokens, job.model.hidden),
        out_(device_, job.tokens, job.model.hidden),
        rows_(device_, 0, job.model.hidden),
        results_(device_, 0, job.model.hidden) {}

  // Collective: one step, of tokens and routing that no other step has, so that a row left from an
  // earlier step is seen.
  void step(int number);
  [[nodiscard]] LocalVerification verify();

  [[nodiscard]] const std::array<double, kParts>& times() const noexcept { return times_; }
  [[nodiscard]] Exchange& exchange() noexcept { return exchange_; }
  [[nodiscard]] const GatedMlp& experts() const noexcept { return mlp_; }
  [[nodiscard]] std::int64_t rows_received() const noexcept { return rows_received_; }
  // The largest rank load over the mean before the replicas were placed.
  [[nodiscard]] double imbalance_before() const noexcept { return imbalance_before_; }

 private:
  // Collective: plans some steps for their loads alone, then has every rank place the experts by them.
  double place_by_load();
  // The routing of a step, where the exchange reads it.
  Routing route(int number);
  void weigh_input();
  GatedMlp make_experts() const;
  void take_counts(Received& received) const;
  void run_experts(const Received& received, TensorView y);
  // Microseconds that this rank needs for `work`, once all ranks have met. On a GPU: until it is done there.
  template <typename Work>
  void time(Part part, Work work) {
    group_.barrier();
    const auto begin = std::chrono::steady_clock::now();
    work();
    synchronize(device_);
    const auto end = std::chrono::steady_clock::now();
    times_[part] = std::chrono::duration<double, std::micro>(end - begin).count();
  }

  const Group& group_;
  const LayerJob& job_;
  Progress& progress_;
  SyntheticExperts synthetic_;
  WireFormat dispatch_wire_, combine_wire_;
  Device device_;
  Exchange exchange_;  // first of what needs the device: it says best what is wrong with it
  Plan plan_;
  MirroredMemory ids_{device_}, weights_{device_};
  TokenRouting routing_;
  double imbalance_before_;
  GatedMlp mlp_;
  Rows x_, out_;
  Rows rows_;     // received rows that travelled in another format, converted back
  Rows results_;  // results that will travel so
  std::array<double, kParts> times_{};
  std::int64_t rows_received_ = 0;
};

double Rank::place_by_load() {
  if (job_.replicas == 0) return 1.0;
  constexpr int kSteps = 4;
  for (int number = 0; number < kSteps; ++number) {
    exchange_.plan(route(number), plan_);
    static_cast<void>(plan_.to_host());  // has run, so its loads are counted
  }
  const std::vector<double> loads(exchange_.loads().begin(), exchange_.loads().end());
  const Placement& now = exchange_.placement();
  const double before = imbalance(rank_loads(now, loads));
  const BalanceConfig config{.ranks = group_.size(), .slots = now.num_slots()};
  exchange_.set_placement(balance({loads}, config, {&now, 1}).front().placement());
  return before;
}

GatedMlp Rank::make_experts() const {
  const Placement& placement = exchange_.placement();
  const auto slots = placement.slot_begin().subspan(static_cast<std::size_t>(group_.rank()), 2);
  const auto mine = placement.slot_to_expert().subspan(
      static_cast<std::size_t>(slots[0]), static_cast<std::size_t>(slots[1] - slots[0]));
  const ExpertsConfig config{.hidden = job_.model.hidden,
                             .expert_hidden = job_.model.expert_hidden,
                             .num_threads = threads_per_rank(group_.size())};
  const WeightSource source = synthetic_.source();
  int made = 0;
  return {device_, config, mine, [&](int expert, Matrix matrix, TensorView weights) {
            if (matrix == Matrix::gate) ++made;
            progress_.tick(fmt::format("Making the weights of {} experts: {} of {}",
                                       placement.num_slots(), (made - 1) * group_.size(),
                                       placement.num_slots()));
            source(expert, matrix, weights);
          }};
}

// What only the device knew of the rows that have come.
void Rank::take_counts(Received& received) const {
  const PlanData& data = plan_.to_host();
  received.slot_begin = data.slot_begin;
  received.slot_counts = data.slot_counts;
  if (job_.config.layout == Layout::tokens) received.rows.rows = data.token_rows_received;
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

// Of the global batch of all steps.
std::int64_t first_token(const Group& group, const LayerJob& job, int number) {
  const int set = group.rank() / job.config.replicated;
  return (static_cast<std::int64_t>(number) * job.sets() + set) * job.tokens;
}

Routing Rank::route(int number) {
  routing_ = synthetic_routing(job_.routing, router_config(job_.model),
                               first_token(group_, job_, number), job_.tokens);
  const auto place = [](MirroredMemory& memory, const auto& values) {
    const auto bytes = std::as_bytes(std::span(values));
    if (memory.bytes() != bytes.size()) memory.resize(bytes.size());
    std::ranges::copy(bytes, memory.host());
    memory.upload();
  };
  place(ids_, routing_.ids);
  place(weights_, routing_.weights);
  Routing view = routing_.view();
  view.ids = ids_.device();
  if (view.weights != nullptr) view.weights = reinterpret_cast<const float*>(weights_.device());
  return view;
}

// Models that put the routing weight on the expert's input, which is then rounded to bf16.
void Rank::weigh_input() {
  const std::int64_t hidden = job_.model.hidden;
  auto* const values = x_.host().row<std::uint16_t>(0);
  for (std::int64_t i = 0; i < job_.tokens * hidden; ++i) {
    std::uint16_t& value = values[i];
    const float weight = routing_.weights[static_cast<std::size_t>(i / hidden)];
    value = float_to_bf16(bf16_to_float(value) * weight);
  }
}

void Rank::step(int number) {
  fill_synthetic_tokens(job_.routing.seed, first_token(group_, job_, number), x_.host());
  const Routing routing = route(number);
  if (routing_.weight_on_input) weigh_input();
  x_.memory.upload();
  Received received;
  TensorView y;
  time(kPlan, [&] { exchange_.plan(routing, plan_); });
  const PlanData& data = plan_.to_host();
  const std::int64_t rows =
      job_.config.layout == Layout::tokens ? data.token_rows_received : data.slot_begin.back();
  // Experts here compute in bf16: with a format on the way, rows are converted back as they arrive.
  DispatchOptions options;
  if (!dispatch_wire_.keeps_dtype()) {
    rows_.resize(std::max<std::int64_t>(rows, 1));
    options.out = rows_.device();
  }
  if (!combine_wire_.keeps_dtype()) results_.resize(rows);
  time(kDispatch, [&] { received = exchange_.dispatch(plan_, x_.device(), options); });
  if (device_.kind == Device::Kind::cuda) take_counts(received);
  time(kExperts, [&] {
    y = combine_wire_.keeps_dtype() ? exchange_.combine_input(plan_) : results_.device();
    run_experts(received, y);
  });
  time(kCombine, [&] { exchange_.combine(plan_, y, out_.device()); });
  rows_received_ = plan_.to_host().rows_received;
}

// Of the last step, whose x it may change.
LocalVerification Rank::verify() {
  const double flop = reference_flop(synthetic_, job_.global_tokens() * job_.model.topk);
  const auto chosen =
      tokens_to_verify(job_.sets(), group_.rank() / job_.config.replicated, job_.tokens, flop);
  // The experts got what the format on the way made of x, the same everywhere.
  const TensorView x = x_.host();
  if (!dispatch_wire_.keeps_dtype()) {
    for (std::int64_t token = 0; token < job_.tokens; ++token) {
      round_trip_row(dispatch_wire_, x.row(token));
    }
  }
  out_.memory.download();
  return verify_tokens(synthetic_, chosen, x, routing_.view(), out_.host(), combine_wire_,
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

void add_loads(const Exchange& exchange, LayerOutcome& outcome) {
  const std::vector<double> loads(exchange.loads().begin(), exchange.loads().end());
  std::ranges::copy(exchange.loads(), outcome.loads);
  const std::vector<double> ranks = rank_loads(exchange.placement(), loads);
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    outcome.rank_rows[rank] = std::llround(ranks[rank]);
  }
  outcome.imbalance = imbalance(ranks);
}

// Ranks of one set verify the same tokens, which count once.
void add_verification(const std::vector<LocalVerification>& ranks, const LayerJob& job,
                      LayerOutcome& outcome) {
  outcome.verified = true;
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    const LocalVerification& local = ranks[rank];
    const std::size_t set = rank / static_cast<std::size_t>(job.config.replicated);
    const bool first = rank % static_cast<std::size_t>(job.config.replicated) == 0;
    outcome.verified_tokens += first ? local.tokens : 0;
    outcome.tolerance = local.tolerance;
    const bool worse = !(local.max_error <= outcome.max_error);  // also for a NaN
    if (worse || outcome.worst_token < 0 || (outcome.verified && !local.passed)) {
      outcome.max_error = local.max_error;
      outcome.worst_token = static_cast<std::int64_t>(set) * job.tokens + local.worst_token;
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
    if (number == warm) rank.exchange().reset_loads();
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
  outcome.counts_traffic = job.launch.device == Device::Kind::cpu;
  add_counts(all_counts, outcome);
  add_loads(rank.exchange(), outcome);
  outcome.imbalance_before = rank.imbalance_before();
  add_verification(verified, job, outcome);
  copy_text(rank.exchange().kernels(), outcome.kernels);
  copy_text(rank.exchange().fabric(), outcome.fabric);
  copy_text(rank.experts().implementation().name, outcome.experts_by);
}

}  // namespace wherry::cli
