// The first half of planning: which slot serves each choice, and how many rows that makes.
#include <algorithm>
#include <bit>

#include "plan/plan.hpp"
#include "support/check.hpp"

namespace wherry {

namespace {

layout::CountHeader fault(PlanFault status, std::int64_t tokens) {
  layout::CountHeader header{};
  header.status = static_cast<std::int32_t>(status);
  header.tokens = static_cast<std::int32_t>(std::clamp<std::int64_t>(tokens, INT32_MIN, INT32_MAX));
  return header;
}

// Remembers for which token something was last seen, so that "seen before in this token?" costs one
// comparison and nothing is cleared between tokens.
class LastToken {
 public:
  explicit LastToken(int count) : token_(static_cast<std::size_t>(count), -1) {}
  // True the first time `which` is seen for `token`.
  bool first(int which, std::int64_t token) {
    std::int32_t& last = token_[static_cast<std::size_t>(which)];
    if (last == token) return false;
    last = static_cast<std::int32_t>(token);
    return true;
  }

 private:
  std::vector<std::int32_t> token_;
};

// Tells routings apart that must be the same (FNV-1a over ids and the bits of weights).
class RoutingHash {
 public:
  void add(std::int64_t id, float weight) noexcept {
    mix(static_cast<std::uint64_t>(id));
    mix(std::bit_cast<std::uint32_t>(weight));
  }
  [[nodiscard]] std::int64_t value() const noexcept { return std::bit_cast<std::int64_t>(hash_); }

 private:
  void mix(std::uint64_t value) noexcept { hash_ = (hash_ ^ value) * 0x100000001B3ULL; }
  std::uint64_t hash_ = 0xCBF29CE484222325ULL;
};

}  // namespace

layout::CountHeader count_routing(const Routing& routing, const ExchangeConfig& config,
                                  const Placement& placement, int rank, PlanData& plan,
                                  std::span<std::int32_t> entries) {
  std::fill(entries.begin(), entries.end(), 0);
  if (routing.tokens < 0) return fault(PlanFault::negative_tokens, routing.tokens);
  if (routing.tokens > config.max_tokens) return fault(PlanFault::too_many_tokens, routing.tokens);
  if (routing.tokens > 0 && routing.ids == nullptr) return fault(PlanFault::no_ids, routing.tokens);
  if (routing.tokens > 0 && routing.topk != config.topk) {
    layout::CountHeader header = fault(PlanFault::bad_topk, routing.tokens);
    header.choice = routing.topk;
    return header;
  }
  plan.tokens = routing.tokens;
  plan.topk = config.topk;
  const auto choices = static_cast<std::size_t>(routing.tokens * config.topk);
  plan.dest.assign(choices, -1);
  plan.slot.assign(choices, -1);
  plan.weight.assign(choices, 0.0F);
  plan.repeat.assign(choices, 0);
  const bool physical = config.expert_ids == ExpertIds::physical;
  const std::int64_t num_ids = physical ? placement.num_slots() : config.experts;
  LastToken slot_seen(placement.num_slots());
  LastToken rank_seen(placement.num_ranks());
  const auto slots = static_cast<std::size_t>(placement.num_slots());
  RoutingHash hash;
  // Which replica serves a token depends on the rank that dispatches it, so every rank that holds it
  // asks for that one.
  const int first_source = rank / config.replicated * config.replicated;
  for (int source = first_source; source < first_source + config.replicated; ++source) {
    const bool mine = source == rank;
    const std::int64_t begin = routing.tokens * (source - first_source) / config.replicated;
    const std::int64_t end = routing.tokens * (source - first_source + 1) / config.replicated;
    if (mine) {
      plan.send_begin = begin;
      plan.send_end = end;
    }
    for (std::int64_t token = begin; token < end; ++token) {
      for (int k = 0; k < config.topk; ++k) {
        const std::int64_t id = routing.id(token, k);
        if (config.replicated > 1) hash.add(id, routing.weight(token, k));
        if (id == -1) continue;
        const bool known = id >= 0 && id < num_ids;
        if (!known || (physical && placement.slot_to_expert()[static_cast<std::size_t>(id)] < 0)) {
          layout::CountHeader header =
              fault(known ? PlanFault::empty_slot : PlanFault::bad_id, routing.tokens);
          header.token = static_cast<std::int32_t>(token);
          header.choice = k;
          header.id = id;
          return header;
        }
        const auto at = static_cast<std::size_t>(token * config.topk + k);
        const int slot = physical ? static_cast<int>(id)
                                  : placement.slot_for(static_cast<int>(id), token, source);
        const int dest = placement.slot_to_rank()[static_cast<std::size_t>(slot)];
        plan.slot[at] = slot;
        plan.dest[at] = dest;
        plan.weight[at] = routing.weight(token, k);
        if (slot_seen.first(slot, token)) {
          entries[static_cast<std::size_t>(slot)] += mine ? 1 : 0;
        } else {
          plan.repeat[at] = 1;
        }
        if (rank_seen.first(dest, token)) {
          entries[slots + static_cast<std::size_t>(dest)] += mine ? 1 : 0;
        }
      }
    }
  }
  const bool share = config.combine_to == CombineTo::share;
  plan.home_begin = share ? plan.send_begin : 0;
  plan.home_end = share ? plan.send_end : plan.tokens;
  layout::CountHeader header = fault(PlanFault::none, routing.tokens);
  header.id = hash.value();
  return header;
}

ErrorCode code_of(PlanFault fault) noexcept {
  const bool in_ids = fault == PlanFault::bad_id || fault == PlanFault::empty_slot;
  return in_ids ? ErrorCode::bad_routing : ErrorCode::bad_argument;
}

std::string describe_fault(const layout::CountHeader& header, const ExchangeConfig& config,
                           const Placement& placement) {
  switch (static_cast<PlanFault>(header.status)) {
    case PlanFault::none: break;
    case PlanFault::bad_id:
      return config.expert_ids == ExpertIds::logical
                 ? fmt::format("ids[{}, {}] is {}; allowed are 0..{} and -1 for no expert",
                               header.token, header.choice, header.id, config.experts - 1)
                 : fmt::format("ids[{}, {}] is {}; allowed are the slots 0..{} and -1 for none",
                               header.token, header.choice, header.id, placement.num_slots() - 1);
    case PlanFault::empty_slot:
      return fmt::format("ids[{}, {}] is slot {}, which holds no expert", header.token,
                         header.choice, header.id);
    case PlanFault::too_many_tokens:
      return fmt::format("routing has {} tokens; max_tokens is {}", header.tokens,
                         config.max_tokens);
    case PlanFault::bad_topk:
      return fmt::format("routing has topk {}; the exchange was made for {}", header.choice,
                         config.topk);
    case PlanFault::no_ids:
      return fmt::format("ids is null although there are {} tokens", header.tokens);
    case PlanFault::negative_tokens:
      return fmt::format("routing has {} tokens; it must be at least 0", header.tokens);
  }
  return fmt::format("unknown plan fault {}", header.status);
}

}  // namespace wherry
