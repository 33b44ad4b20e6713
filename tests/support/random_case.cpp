#include "support/random_case.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "support/delays.hpp"

namespace wherry::test {

namespace {

class Draw {
 public:
  explicit Draw(std::uint64_t seed) : random_(seed) {}
  // In [least, most].
  std::int64_t between(std::int64_t least, std::int64_t most) {
    return least +
           static_cast<std::int64_t>(random_() % static_cast<std::uint64_t>(most - least + 1));
  }
  // Small ones as often as large ones.
  std::int64_t log_between(std::int64_t least, std::int64_t most) {
    const double unit = static_cast<double>(random_() >> 11) * 0x1p-53;
    const double value = static_cast<double>(least) *
                         std::pow(static_cast<double>(most + 1) / static_cast<double>(least), unit);
    return std::clamp(static_cast<std::int64_t>(value), least, most);
  }
  bool one_in(int n) { return between(1, n) == 1; }
  template <typename T>
  T one_of(std::initializer_list<T> values) {
    return *(values.begin() + between(0, static_cast<std::int64_t>(values.size()) - 1));
  }
  std::mt19937_64& engine() { return random_; }

 private:
  std::mt19937_64 random_;
};

// Every expert somewhere, some twice, empty slots, uneven ranks down to none at all.
Placement random_placement(Draw& draw, int experts, int ranks) {
  std::vector<int> slots(static_cast<std::size_t>(experts));
  std::iota(slots.begin(), slots.end(), 0);
  const std::int64_t replicas = draw.between(0, std::min(experts, 8));
  for (std::int64_t i = 0; i < replicas; ++i) {
    slots.push_back(static_cast<int>(draw.between(0, experts - 1)));
  }
  if (draw.one_in(3)) slots.push_back(-1);
  std::shuffle(slots.begin(), slots.end(), draw.engine());
  std::vector<int> begin{0};
  for (int rank = 1; rank < ranks; ++rank) {
    begin.push_back(static_cast<int>(draw.between(0, static_cast<std::int64_t>(slots.size()))));
  }
  begin.push_back(static_cast<int>(slots.size()));
  std::ranges::sort(begin);
  return Placement::from_slots(experts, std::move(slots), std::move(begin));
}

void draw_wires(Draw& draw, ExchangeConfig& c) {
  const auto wire = [&] {
    return draw.one_of({Wire::same, Wire::bf16, Wire::f16, Wire::e4m3_block128,
                        Wire::e4m3_block128_pow2, Wire::mxfp8_e4m3, Wire::nvfp4, Wire::int8_token});
  };
  const auto legal = [&](Wire w, ScaleLayout scale_layout) {
    try {
      static_cast<void>(wire_format(w, c.dtype, c.hidden, scale_layout));
      return true;
    } catch (const Error&) {
      return false;
    }
  };
  const ScaleLayout scale_layout =
      draw.one_of({ScaleLayout::row_major, ScaleLayout::column_major, ScaleLayout::packed_ue8m0});
  const Wire out = wire();
  if (legal(out, scale_layout)) {
    c.dispatch_wire = out;
    c.scale_layout = scale_layout;
  }
  const Wire home = wire();
  if (legal(home, ScaleLayout::row_major)) c.combine_wire = home;
}

Batch random_batch(Draw& draw, const ExchangeConfig& c, int parts) {
  // Each (token, choice, element) costs the oracle some nanoseconds.
  const std::int64_t most = std::max<std::int64_t>(1, 300'000 / (c.hidden * (c.topk + 1)) / parts);
  Batch batch{c.experts, c.topk, c.hidden, {0}, {}, {}};
  for (int part = 0; part < parts; ++part) {
    const std::int64_t tokens =
        draw.one_in(5) ? 0 : draw.between(0, std::min<std::int64_t>(most, 96));
    batch.token_begin.push_back(batch.token_begin.back() + tokens);
  }
  const int empty_percent = draw.one_of({0, 0, 20, 100});
  const int few = static_cast<int>(draw.one_in(4) ? draw.between(1, c.experts) : c.experts);
  for (std::int64_t i = 0; i < batch.tokens() * c.topk; ++i) {
    const bool empty = draw.between(0, 99) < empty_percent;
    batch.ids.push_back(empty ? -1 : static_cast<std::int32_t>(draw.between(0, few - 1)));
    batch.weights.push_back(0.05F + static_cast<float>(draw.between(0, 999)) / 1000.0F);
  }
  return batch;
}

// Limits that the routing keeps, or (drop) does not.
void draw_limits(Draw& draw, RandomCase& r) {
  ExchangeConfig& c = r.config;
  const std::int64_t most = c.max_tokens * (r.ranks / c.replicated);
  if (c.layout != Layout::tokens && draw.one_in(4)) {
    c.overflow = Overflow::drop;
    (c.layout == Layout::slots ? c.rows_per_slot : c.receive_rows) = draw.log_between(1, most + 1);
  } else if (draw.one_in(4)) {
    // Room for all that can come, said in so many words.
    if (c.layout == Layout::slots) c.rows_per_slot = most;
    if (c.layout == Layout::tokens) c.receive_rows = most;
    if (c.layout == Layout::grouped) c.receive_rows = most * c.topk;
  }
}

}  // namespace

RandomCase random_case(std::uint64_t seed) {
  Draw draw(seed * 0x9E3779B97F4A7C15ULL + 1);
  RandomCase r;
  r.seed = seed;
  r.ranks = static_cast<int>(draw.between(1, 16));
  r.processes = r.ranks <= 8 && draw.one_in(4);
  r.delays = draw.one_in(4);
  r.wide_ids = draw.one_in(3);
  r.copied_rows = draw.one_in(4);
  r.scalars = draw.one_in(3);
  r.addend = draw.one_in(3);

  ExchangeConfig& c = r.config;
  c.experts = static_cast<int>(draw.log_between(1, 1025));
  c.topk = static_cast<int>(draw.log_between(1, 32));
  c.hidden = draw.one_in(3) ? draw.one_of<std::int64_t>({1, 8, 2050, 2056, 2880, 3584, 7168, 16384})
                            : draw.log_between(1, 16384);
  c.dtype = draw.one_of({DType::bf16, DType::bf16, DType::f16, DType::f32, DType::f64});
  c.layout = draw.one_of({Layout::grouped, Layout::tokens, Layout::slots});
  c.reduction =
      c.layout == Layout::tokens || draw.one_in(2) ? Reduction::by_rank : Reduction::by_token;
  if (c.reduction == Reduction::by_rank && draw.one_in(2)) c.sum_at = SumAt::expert;
  c.weights = draw.one_in(5) ? Weights::caller : Weights::multiply;
  if (draw.one_in(3)) draw_wires(draw, c);
  if (draw.one_in(2)) c.placement = random_placement(draw, c.experts, r.ranks);
  if (draw.one_in(5)) c.expert_ids = ExpertIds::physical;
  std::vector<int> divisors;
  for (int g = 1; g <= r.ranks; ++g) {
    if (r.ranks % g == 0) divisors.push_back(g);
  }
  if (draw.one_in(3)) {
    c.replicated = divisors[static_cast<std::size_t>(
        draw.between(0, static_cast<std::int64_t>(divisors.size()) - 1))];
    c.combine_to = draw.one_of({CombineTo::all, CombineTo::share});
  }
  if (c.layout == Layout::grouped) c.alignment = draw.one_of({1, 1, 4, 16, 128});
  c.depth = static_cast<int>(draw.between(1, 3));
  c.num_threads = static_cast<int>(draw.between(1, 2));
  c.populate = false;
  c.deadline = Seconds(60);
  if (draw.one_in(4)) c.kernels = "reference";

  r.batch = random_batch(draw, c, r.ranks / c.replicated);
  c.max_tokens = r.batch.max_tokens() + draw.between(0, 3);
  draw_limits(draw, r);
  const bool converts_results = !wire_format(c.combine_wire, c.dtype, c.hidden).keeps_dtype() &&
                                (c.layout == Layout::tokens || c.reduction == Reduction::by_token);
  r.own_memory = converts_results || draw.one_in(3);
  if (c.reduction == Reduction::by_rank &&
      !wire_format(c.combine_wire, c.dtype, c.hidden).keeps_dtype()) {
    c.sum_at = std::nullopt;  // only the default is legal
  }

  const std::int64_t steps = draw.between(1, 5);
  for (std::int64_t i = 0; i < steps; ++i) {
    RandomCase::Step step;
    step.use =
        draw.one_of({RandomCase::Use::paired, RandomCase::Use::paired, RandomCase::Use::released,
                     RandomCase::Use::abandoned, RandomCase::Use::overlapping});
    if (step.use == RandomCase::Use::overlapping && c.depth < 2) step.use = RandomCase::Use::paired;
    step.replan = i == 0 || !draw.one_in(3);
    step.shift = static_cast<int>(draw.between(0, c.experts - 1));
    r.steps.push_back(step);
  }
  return r;
}

std::string RandomCase::text() const {
  std::string all = fmt::format("seed {}: {} {}", seed, ranks, processes ? "processes" : "threads");
  for (const auto& [field, value] : config.describe(ranks)) {
    all += fmt::format(", {} {}", field, value);
  }
  all += fmt::format(", num_threads {}, kernels '{}', tokens [{}]", config.num_threads,
                     config.kernels, fmt::join(batch.token_begin, " "));
  for (const auto& [set, what] : {std::pair{delays, "delays"},
                                  {wide_ids, "int64 ids"},
                                  {own_memory, "own memory"},
                                  {copied_rows, "copied rows"},
                                  {scalars, "scalars"},
                                  {addend, "addend"}}) {
    if (set) all += fmt::format(", {}", what);
  }
  all += ", steps";
  for (const Step& step : steps) {
    constexpr const char* kUse[] = {"paired", "released", "abandoned", "overlapping"};
    all += fmt::format(" {}{}+{}", kUse[static_cast<int>(step.use)],
                       step.replan ? "" : " (same plan)", step.shift);
  }
  return all;
}

namespace {

// One rank's side of a case.
template <typename T>
class Runner {
 public:
  Runner(Group& group, const RandomCase& r)
      : r_(r),
        exchange_(group, r.config),
        home_(home_of(exchange_)),
        tokens_(r.batch.tokens_of(home_)),
        first_(r.batch.token_begin[static_cast<std::size_t>(home_)]),
        x_(tokens_of<T>(r.batch, home_)) {
    scalars_.assign(r.batch.weights.begin() + first_ * r.batch.topk,
                    r.batch.weights.begin() + (first_ + tokens_) * r.batch.topk);
  }

  void run() {
    Plan plan = exchange_.make_plan();
    Plan other = exchange_.make_plan();
    for (const RandomCase::Step& step : r_.steps) {
      if (step.replan) fill(plan, step.shift);
      if (step.use == RandomCase::Use::overlapping) {
        fill(other, step.shift + 1);
        overlap(plan, other);
        continue;
      }
      auto flight = begin(plan);
      arrive(flight);
      if (step.use == RandomCase::Use::released) exchange_.release(flight.received);
      if (step.use != RandomCase::Use::paired) continue;
      expert(flight);
      auto home = combine(flight);
      home.finish();
      verify(flight);
    }
  }

 private:
  struct Flight {
    const Plan* plan;
    Exchange::DispatchHandle handle;
    Received received;
    std::vector<T> rows, y, out;
    std::vector<float> scalars_home;
    TensorView results;
  };

  [[nodiscard]] std::int64_t hidden() const { return r_.batch.hidden; }
  [[nodiscard]] int expert_of(int slot) const {
    return exchange_.placement().slot_to_expert()[static_cast<std::size_t>(slot)];
  }

  void fill(Plan& plan, int shift) {
    const Placement& placement = exchange_.placement();
    std::vector<std::int32_t> ids;
    for (std::int64_t i = first_ * r_.batch.topk; i < (first_ + tokens_) * r_.batch.topk; ++i) {
      int id = r_.batch.ids[static_cast<std::size_t>(i)];
      if (id >= 0) id = (id + shift) % r_.batch.experts;
      if (id >= 0 && r_.config.expert_ids == ExpertIds::physical) {
        const auto slots = placement.slots_of(id);
        id = slots[static_cast<std::size_t>(i) % slots.size()];
      }
      ids.push_back(id);
    }
    const std::vector<std::int64_t> wide(ids.begin(), ids.end());
    const float* const weights = r_.batch.weights.data() + first_ * r_.batch.topk;
    exchange_.plan(r_.wide_ids ? Routing(wide.data(), weights, tokens_, r_.batch.topk)
                               : Routing(ids.data(), weights, tokens_, r_.batch.topk),
                   plan);
    const PlanData& data = plan.to_host();
    for (std::size_t i = 0; i < ids.size(); ++i) {
      const int slot = data.slot[i];
      const bool right = ids[i] < 0 ? slot == -1
                         : r_.config.expert_ids == ExpertIds::physical
                             ? slot == ids[i]
                             : slot >= 0 && expert_of(slot) == ids[i];
      expect(right, fmt::format("choice {} of id {} goes to slot {}", i, ids[i], slot));
    }
  }

  Flight begin(const Plan& plan) {
    Flight f;
    f.plan = &plan;
    DispatchOptions options;
    const PlanData& data = plan.to_host();
    const std::int64_t rows =
        r_.config.layout == Layout::tokens ? data.token_rows_received : data.slot_begin.back();
    if (r_.copied_rows || r_.config.dispatch_wire != Wire::same) {
      f.rows.resize(static_cast<std::size_t>(rows * hidden()));
      options.out = view(f.rows, hidden());
    }
    if (r_.scalars) options.row_scalars = scalars_.data();
    f.handle = exchange_.dispatch_begin(plan, view(x_, hidden()), options);
    return f;
  }

  void arrive(Flight& f) { f.received = f.handle.finish(); }

  void expert(Flight& f) {
    f.y.resize(static_cast<std::size_t>(f.received.rows.rows * hidden()));
    f.results = r_.own_memory ? view(f.y, hidden()) : exchange_.combine_input(*f.plan);
    if (f.received.rows.rows > 0) apply_experts<T>(exchange_, f.received, f.results);
  }

  Exchange::CombineHandle combine(Flight& f) {
    const auto home_elements = static_cast<std::size_t>(f.plan->home_tokens() * hidden());
    f.out.resize(home_elements);
    CombineOptions options;
    addend_.assign(home_elements, Codec<T>::store(static_cast<typename Codec<T>::Sum>(0.375)));
    if (r_.addend) options.addend = view(addend_, hidden());
    if (r_.scalars) {
      f.scalars_home.resize(static_cast<std::size_t>(f.plan->home_tokens() * r_.batch.topk));
      options.row_scalars = f.received.row_scalars.data();
      options.scalars_out = f.scalars_home.data();
    }
    return exchange_.combine_begin(*f.plan, f.results, view(f.out, hidden()), options);
  }

  // Two steps in flight, finished in another order than they began.
  void overlap(const Plan& plan_a, const Plan& plan_b) {
    Flight a = begin(plan_a);
    Flight b = begin(plan_b);
    arrive(b);
    arrive(a);
    expert(b);
    auto home_b = combine(b);
    expert(a);
    auto home_a = combine(a);
    home_a.finish();
    verify(a);
    home_b.finish();
    verify(b);
  }

  void verify(const Flight& f) const {
    const PlanData& data = f.plan->to_host();
    const auto [begin, end] = home_range(exchange_, r_.batch);
    expect(f.plan->home_tokens() == end - begin, "home_tokens()");
    for (std::int64_t t = begin; t < end; ++t) {
      const auto choices =
          choices_of(r_.config, data, t, [&](int slot) { return expert_of(slot); });
      const std::span addend = r_.addend
                                   ? std::span(addend_).first(static_cast<std::size_t>(hidden()))
                                   : std::span<const T>{};
      const std::vector<T> want =
          Expected<T>(r_.config, row_of<T>(r_.batch, first_ + t)).sums(choices, addend);
      const std::span got(f.out.data() + (t - begin) * hidden(), want.size());
      expect(std::ranges::equal(std::as_bytes(std::span(want)), std::as_bytes(got)),
             fmt::format("rank {}, token {}: the sum is wrong", exchange_.rank(), t));
      if (r_.scalars) verify_scalars(f, t, t - begin);
    }
  }

  // The scalar of a row is the sum of the scalars of the choices that it serves.
  void verify_scalars(const Flight& f, std::int64_t token, std::int64_t home) const {
    const PlanData& data = f.plan->to_host();
    for (int k = 0; k < r_.batch.topk; ++k) {
      const auto at = static_cast<std::size_t>(token * r_.batch.topk + k);
      float want = 0.0F;
      for (int other = 0; data.row[at] >= 0 && other < r_.batch.topk; ++other) {
        const auto same = static_cast<std::size_t>(token * r_.batch.topk + other);
        if (data.slot[same] == data.slot[at]) want += scalars_[same];
      }
      const float got = f.scalars_home[static_cast<std::size_t>(home * r_.batch.topk + k)];
      expect(got == want, fmt::format("rank {}, token {}, choice {}: scalar {} came home as {}",
                                      exchange_.rank(), token, k, want, got));
    }
  }

  const RandomCase& r_;
  Exchange exchange_;
  int home_;
  std::int64_t tokens_, first_;
  std::vector<T> x_;
  std::vector<T> addend_;
  std::vector<float> scalars_;
};

void run_rank(Group& group, const RandomCase& r) {
  if (r.delays) delay_signals(group, r.config);
  switch (r.config.dtype) {
    case DType::bf16: return Runner<Bf16>(group, r).run();
    case DType::f16: return Runner<_Float16>(group, r).run();
    case DType::f32: return Runner<float>(group, r).run();
    case DType::f64: return Runner<double>(group, r).run();
    case DType::raw: break;
  }
}

}  // namespace

void run_case(const RandomCase& r) {
  const auto rank = [&](Group& group) { run_rank(group, r); };
  r.processes ? run_processes(r.ranks, rank) : run_threads(r.ranks, rank);
}

}  // namespace wherry::test
