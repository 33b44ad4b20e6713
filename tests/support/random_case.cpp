#include "support/random_case.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

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

}  // namespace wherry::test
