#include "exchange/config.hpp"

#include <algorithm>
#include <limits>
#include <string>

#include "support/check.hpp"

namespace wherry {

std::string_view name(Layout layout) noexcept {
  switch (layout) {
    case Layout::grouped: return "grouped";
    case Layout::tokens: return "tokens";
    case Layout::slots: return "slots";
  }
  return "grouped";
}

std::string_view name(Reduction reduction) noexcept {
  switch (reduction) {
    case Reduction::by_token: return "by_token";
    case Reduction::by_rank: return "by_rank";
  }
  return "by_token";
}

std::string_view name(Overflow overflow) noexcept {
  switch (overflow) {
    case Overflow::error: return "error";
    case Overflow::drop: return "drop";
  }
  return "error";
}

std::string_view name(Weights weights) noexcept {
  switch (weights) {
    case Weights::multiply: return "multiply";
    case Weights::caller: return "caller";
  }
  return "multiply";
}

std::string_view name(SumAt sum_at) noexcept {
  switch (sum_at) {
    case SumAt::home: return "home";
    case SumAt::expert: return "expert";
  }
  return "home";
}

std::string_view name(ExpertIds expert_ids) noexcept {
  switch (expert_ids) {
    case ExpertIds::logical: return "logical";
    case ExpertIds::physical: return "physical";
  }
  return "logical";
}

std::string_view name(CombineTo combine_to) noexcept {
  switch (combine_to) {
    case CombineTo::all: return "all";
    case CombineTo::share: return "share";
  }
  return "all";
}

Reduction ExchangeConfig::effective_reduction() const noexcept {
  return reduction.value_or(layout == Layout::slots ? Reduction::by_token : Reduction::by_rank);
}

SumAt ExchangeConfig::effective_sum_at() const noexcept {
  const bool converts =
      combine_wire != Wire::same && !WireFormat{.wire = combine_wire, .dtype = dtype}.keeps_dtype();
  return sum_at.value_or(converts || kernels == "cuda_link" ? SumAt::expert : SumAt::home);
}

namespace {

// Throws bad_argument naming the field.
void check_wire(const ExchangeConfig& c, const char* field, Wire wire, ScaleLayout scale_layout,
                int rank) {
  try {
    static_cast<void>(wire_format(wire, c.dtype, c.hidden, scale_layout));
  } catch (const Error& error) {
    throw Error(ErrorCode::bad_argument, {Stage::startup, rank, -1},
                fmt::format("{} is {}: {}", field, name(wire), error.message()));
  }
}

// Where rows may be and how many, without their bytes. Nothing overflows if max_tokens * ranks and
// each of slots, topk and alignment fit 31 bits.
Capacity rows_of(const ExchangeConfig& config, const Placement& placement) {
  const std::int64_t slots = placement.max_local_slots();
  const std::int64_t most_token_rows =
      config.max_tokens * (placement.num_ranks() / config.replicated);
  const std::int64_t rows_per_token = std::min<std::int64_t>(config.topk, slots);
  const auto limited = [&config](std::int64_t most) {
    return config.receive_rows > 0 ? std::min(config.receive_rows, most) : most;
  };
  const auto size = [](std::int64_t value) { return static_cast<std::uint64_t>(value); };
  Capacity c;
  layout::WindowParams& p = c.params;
  switch (config.layout) {
    case Layout::grouped:
      c.limit = limited(most_token_rows * rows_per_token);
      p.row_capacity = size(c.limit + slots * (config.alignment - 1));
      p.scalar_capacity = p.row_capacity;
      break;
    case Layout::tokens:
      c.limit = limited(most_token_rows);
      p.row_capacity = size(c.limit);
      p.scalar_capacity = size(c.limit * rows_per_token);
      break;
    case Layout::slots:
      c.rows_per_slot = config.rows_per_slot > 0 ? std::min(config.rows_per_slot, most_token_rows)
                                                 : most_token_rows;
      p.row_capacity = size(c.rows_per_slot * slots);
      p.scalar_capacity = p.row_capacity;
      break;
  }
  const kernels::Mode mode = mode_of(config);
  if (mode.sends_entries()) c.token_rows = mode.sends_token_rows() ? c.limit : most_token_rows;
  p.token_row_capacity = size(c.token_rows);
  return c;
}

// Roughly, for what no 64 bits can count.
double rough_bytes(const layout::WindowParams& p) {
  const auto times = [](std::uint64_t rows, std::uint64_t bytes) {
    return static_cast<double>(rows) * static_cast<double>(bytes);
  };
  return static_cast<double>(p.depth) *
         (times(p.row_capacity, p.row_bytes + p.result_bytes + p.home_scale_bytes) +
          times(p.partial_capacity, p.partial_bytes + p.home_scale_bytes) +
          static_cast<double>(p.scale_plane_bytes));
}

constexpr int kMaxDepth = 16;
constexpr std::int64_t kMaxHidden = 1 << 30;
constexpr std::int64_t kMaxRows = std::numeric_limits<std::int32_t>::max();  // places are int32
constexpr double kMaxWindowBytes = 1LL << 56;
constexpr int kMaxRanks = 65535;  // a fault word names a rank in 16 bits

}  // namespace

void check_config(const ExchangeConfig& c, int rank, int ranks) {
  const auto require = [rank](bool good, const std::string& problem) {
    if (!good) throw Error(ErrorCode::bad_argument, {Stage::startup, rank, -1}, problem);
  };
  require(ranks <= kMaxRanks,
          fmt::format("the group has {} ranks; at most {} are allowed", ranks, kMaxRanks));
  require(c.experts >= 1, fmt::format("experts is {}; it must be at least 1", c.experts));
  require(c.topk >= 1 && c.topk <= kernels::kMaxTopk,
          fmt::format("topk is {}; it must lie in 1..{}", c.topk, kernels::kMaxTopk));
  require(c.hidden >= 1 && c.hidden <= kMaxHidden,
          fmt::format("hidden is {}; it must lie in 1..{}", c.hidden, kMaxHidden));
  check_wire(c, "dispatch_wire", c.dispatch_wire, c.scale_layout, rank);
  check_wire(c, "combine_wire", c.combine_wire, ScaleLayout::row_major, rank);
  require(c.effective_reduction() != Reduction::by_rank || c.layout == Layout::tokens ||
              c.effective_sum_at() == SumAt::expert || !mode_of(c).converts_home(),
          fmt::format("combine_wire is {}, which goes with sum_at expert: the rows of one rank are "
                      "summed before they are converted",
                      name(c.combine_wire)));
  require(c.replicated >= 1 && ranks % c.replicated == 0,
          fmt::format("replicated is {}; it must be at least 1 and divide the {} ranks",
                      c.replicated, ranks));
  const int sets = ranks / c.replicated;  // of ranks that bring the same tokens
  require(c.max_tokens >= 1 && c.max_tokens <= kMaxRows / sets,
          fmt::format("max_tokens is {}; with {} ranks it must lie in 1..{}", c.max_tokens, ranks,
                      kMaxRows / sets));
  require(
      c.layout != Layout::tokens || c.effective_reduction() == Reduction::by_rank,
      "layout tokens goes with reduction by_rank: the caller sums what its rank has of a token");
  require(c.layout != Layout::tokens || c.overflow == Overflow::error,
          "layout tokens goes with overflow error: a dropped row would leave holes in its slots");
  require(
      c.receive_rows >= 0,
      fmt::format("receive_rows is {}; it must be at least 1, or 0 for no limit", c.receive_rows));
  require(c.receive_rows == 0 || c.layout != Layout::slots,
          "receive_rows is for grouped and tokens; slots has rows_per_slot");
  require(c.rows_per_slot >= 0,
          fmt::format("rows_per_slot is {}; it must be at least 1, or 0 for no limit",
                      c.rows_per_slot));
  require(c.rows_per_slot == 0 || c.layout == Layout::slots,
          "rows_per_slot is for layout slots; others have receive_rows");
  require(c.alignment >= 1, fmt::format("alignment is {}; it must be at least 1", c.alignment));
  require(c.alignment == 1 || c.layout == Layout::grouped, "alignment is for layout grouped");
  require(c.depth >= 1 && c.depth <= kMaxDepth,
          fmt::format("depth is {}; it must lie in 1..{}", c.depth, kMaxDepth));
  require(c.deadline.count() > 0,
          fmt::format("deadline is {} s; it must be positive", c.deadline.count()));
  require(c.num_threads >= 1,
          fmt::format("num_threads is {}; it must be at least 1", c.num_threads));
  if (c.placement.has_value()) {
    require(c.placement->num_experts() == c.experts,
            fmt::format("placement has {} experts; experts is {}", c.placement->num_experts(),
                        c.experts));
    require(
        c.placement->num_ranks() == ranks,
        fmt::format("placement has {} ranks; the group has {}", c.placement->num_ranks(), ranks));
  }
  const Placement placement = placement_of(c, ranks);
  const layout::WindowParams rows = rows_of(c, placement).params;
  const std::uint64_t most =
      std::max({rows.row_capacity, rows.scalar_capacity, rows.token_row_capacity});
  require(most <= static_cast<std::uint64_t>(kMaxRows),
          fmt::format("up to {} rows could arrive at a rank; at most {} can be numbered: lower "
                      "max_tokens or alignment, or set receive_rows or rows_per_slot",
                      most, kMaxRows));
  const double bytes = rough_bytes(capacity_of(c, placement).params);
  require(bytes < kMaxWindowBytes,
          fmt::format("the window would have some {:.2g} bytes: lower hidden, max_tokens or "
                      "depth, or set receive_rows or rows_per_slot",
                      bytes));
}

Placement placement_of(const ExchangeConfig& config, int ranks) {
  return config.placement.has_value() ? *config.placement
                                      : Placement::contiguous(config.experts, ranks);
}

Capacity capacity_of(const ExchangeConfig& config, const Placement& placement) {
  const auto size = [](std::int64_t value) { return static_cast<std::uint64_t>(value); };
  const kernels::Mode mode = mode_of(config);
  Capacity c = rows_of(config, placement);
  layout::WindowParams& p = c.params;
  p.ranks = size(placement.num_ranks());
  p.num_slots = size(placement.num_slots());
  p.topk = size(config.topk);
  p.depth = size(config.depth);
  const auto rows = static_cast<std::int64_t>(p.row_capacity);
  p.row_bytes = size(mode.dispatch_wire.payload_bytes);
  p.scale_plane_bytes = size(scale_plane_bytes(mode.dispatch_wire, rows));
  p.result_capacity = p.row_capacity;
  if (config.dtype == DType::raw) return c;  // such rows cannot be summed: nothing goes home
  p.result_bytes = size(mode.keeps_results() ? config.hidden * dtype_bytes(config.dtype)
                                             : mode.combine_wire.payload_bytes);
  p.home_scale_bytes = size(mode.combine_wire.scale_bytes);
  if (mode.sums_partials()) {
    p.partial_bytes = size(mode.combine_wire.payload_bytes);
    p.partial_capacity = p.token_row_capacity;
  }
  return c;
}

SharedLayout share_window(std::span<const layout::WindowParams> exchanges) {
  SharedLayout shared;
  std::uint64_t rows = 0;
  for (const layout::WindowParams& p : exchanges) rows += layout::control_bytes(p);
  std::uint64_t begin = 0;
  for (const layout::WindowParams& p : exchanges) {
    shared.places.push_back({begin, rows - begin});
    shared.bytes =
        std::max(shared.bytes, begin + layout::make_window_layout(p, rows - begin).bytes);
    begin += layout::control_bytes(p);
  }
  return shared;
}

kernels::Mode mode_of(const ExchangeConfig& config) {
  return {config.layout,
          config.effective_reduction(),
          config.weights,
          config.effective_sum_at(),
          config.dtype,
          config.hidden,
          wire_format(config.dispatch_wire, config.dtype, config.hidden, config.scale_layout),
          wire_format(config.combine_wire, config.dtype, config.hidden)};
}

std::uint64_t ExchangeConfig::window_bytes(int ranks) const {
  check_config(*this, -1, ranks);
  return layout::make_window_layout(capacity_of(*this, placement_of(*this, ranks)).params).bytes;
}

std::vector<std::pair<std::string, std::string>> ExchangeConfig::describe(int ranks) const {
  const Placement where = placement_of(*this, ranks);
  const auto text = [](const auto& value) { return fmt::format("{}", value); };
  return {
      {"experts", text(experts)},
      {"topk", text(topk)},
      {"hidden", text(hidden)},
      {"max_tokens", text(max_tokens)},
      {"dtype", std::string(name(dtype))},
      {"layout", std::string(name(layout))},
      {"reduction", std::string(name(effective_reduction()))},
      {"weights", std::string(name(weights))},
      {"sum_at", std::string(name(effective_sum_at()))},
      {"dispatch_wire", std::string(name(dispatch_wire))},
      {"combine_wire", std::string(name(combine_wire))},
      {"scale_layout", std::string(name(scale_layout))},
      {"placement.slot_to_expert", fmt::format("{}", fmt::join(where.slot_to_expert(), " "))},
      {"placement.slot_begin", fmt::format("{}", fmt::join(where.slot_begin(), " "))},
      {"expert_ids", std::string(name(expert_ids))},
      {"replicated", text(replicated)},
      {"combine_to", std::string(name(combine_to))},
      {"receive_rows", text(receive_rows)},
      {"rows_per_slot", text(rows_per_slot)},
      {"overflow", std::string(name(overflow))},
      {"alignment", text(alignment)},
      {"depth", text(depth)},
      {"deadline", text(deadline.count())},
  };
}

}  // namespace wherry
