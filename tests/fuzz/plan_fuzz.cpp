// Any configuration and any routing end in a typed error or in plans that satisfy plan_checks.hpp.

#include "fuzz/numbers.hpp"
#include "support/plan_checks.hpp"

namespace wherry::test {
namespace {

constexpr std::int64_t kLeast = std::numeric_limits<std::int64_t>::min();
constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();

// Numbers of every size, from three bytes: where something overflows is near a power of two.
std::int64_t wild(const Numbers& any) {
  const std::int64_t size = (std::int64_t{1} << any(0, 62)) + any(-8, 8);
  return any(0, 3) == 0 ? -size : size;
}

// One field out of line: any value of its type, legal or not. (experts stays small: a placement of
// 2^31 experts is legal, and 30 GB.)
constexpr int kNumFields = 14;
void spoil_config(std::int64_t field, std::int64_t value, ExchangeConfig& config) {
  constexpr auto kWires = static_cast<std::uint64_t>(Wire::int8_token) + 1;
  const auto one_of = [value](std::uint64_t count) {
    return static_cast<int>(static_cast<std::uint64_t>(value) % count);
  };
  switch (field) {
    case 0: config.experts = one_of(4000) - 2000; return;
    case 1: config.topk = static_cast<int>(value); return;
    case 2: config.hidden = value; return;
    case 3: config.max_tokens = value; return;
    case 4: config.receive_rows = value; return;
    case 5: config.rows_per_slot = value; return;
    case 6: config.alignment = static_cast<int>(value); return;
    case 7: config.depth = static_cast<int>(value); return;
    case 8: config.reduction = static_cast<Reduction>(one_of(2)); return;
    case 9: config.overflow = static_cast<Overflow>(one_of(2)); return;
    case 10: config.dtype = static_cast<DType>(one_of(5)); return;
    case 11: config.dispatch_wire = static_cast<Wire>(one_of(kWires)); return;
    case 12: config.replicated = static_cast<int>(value); return;
    case 13: config.combine_wire = static_cast<Wire>(one_of(kWires)); return;
    default: return;
  }
}

// What the fault must be, or none if the routing stays legal.
PlanFault spoil_routing(const Numbers& any, const ExchangeConfig& config,
                        const Placement& placement, RankRouting& r) {
  switch (any(0, 4)) {
    case 0: {  // an id
      if (r.ids.empty()) return PlanFault::none;
      const auto where = static_cast<std::size_t>(any(0, std::ssize(r.ids) - 1));
      r.ids[where] = any(kLeast, kMost);
      r.ids32[where] = static_cast<std::int32_t>(r.ids[where]);
      const std::int64_t id = r.view.ids_are_int64 ? r.ids[where] : r.ids32[where];
      if (id == -1) return PlanFault::none;
      if (config.expert_ids == ExpertIds::logical) {
        return id < 0 || id >= config.experts ? PlanFault::bad_id : PlanFault::none;
      }
      if (id < 0 || id >= placement.num_slots()) return PlanFault::bad_id;
      const bool empty = placement.slot_to_expert()[static_cast<std::size_t>(id)] < 0;
      return empty ? PlanFault::empty_slot : PlanFault::none;
    }
    case 1: r.view.tokens = any(kLeast, -1); return PlanFault::negative_tokens;
    case 2:
      if (config.max_tokens == kMost) return PlanFault::none;
      r.view.tokens = any(config.max_tokens + 1, kMost);
      return PlanFault::too_many_tokens;
    case 3: r.view.ids = nullptr; return r.view.tokens > 0 ? PlanFault::no_ids : PlanFault::none;
    default:
      r.view.topk = static_cast<int>(any(INT32_MIN, INT32_MAX));
      return r.view.tokens > 0 && r.view.topk != config.topk ? PlanFault::bad_topk
                                                             : PlanFault::none;
  }
}

}  // namespace

void run(Bytes bytes) {
  const Numbers any = [&bytes](auto least, auto most) { return bytes.between(least, most); };
  const std::int64_t field = any(0, 2 * kNumFields);  // first: short inputs choose it too
  const std::int64_t value = wild(any);
  PlanCase c = any_case(any);
  spoil_config(field, value, c.config);
  try {
    check_config(c.config, 0, c.ranks);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::bad_argument) throw;
    return;
  }
  static_cast<void>(c.config.window_bytes(c.ranks));
  static_cast<void>(c.config.describe(c.ranks));
  ExchangeConfig small = c.config;  // a legal max_tokens may be more than there is memory
  small.max_tokens = std::min<std::int64_t>(small.max_tokens, 12);
  const Placement placement = placement_of(c.config, c.ranks);
  std::vector<PlanFault> faults;
  for (int rank = 0; rank < c.ranks; ++rank) {
    const bool leads = rank % c.config.replicated == 0;
    c.routings.push_back(leads ? any_routing(any, small, c.ranks)
                               : same_routing(c.routings.back()));
  }
  for (RankRouting& routing : c.routings) {
    faults.push_back(any(0, 7) == 0 ? spoil_routing(any, c.config, placement, routing)
                                    : PlanFault::none);
  }
  const Planned planned = plan_group(c);
  for (std::size_t rank = 0; rank < faults.size(); ++rank) {
    const auto status = static_cast<PlanFault>(planned.headers[rank].status);
    if (status != faults[rank] ||
        describe_fault(planned.headers[rank], c.config, planned.placement).empty()) {
      throw std::runtime_error(fmt::format("rank {}: fault {}, expected {}", rank,
                                           static_cast<int>(status),
                                           static_cast<int>(faults[rank])));
    }
  }
  if (!planned.routings_are_good(c.config)) return;
  PlanChecker(c, planned).check();
  if (planned.errors[0].has_value()) return;
  for (const PlanData& plan : planned.plans) static_cast<void>(plan.to_string());
}

}  // namespace wherry::test
