// The second half of planning: everyone's counts become places. Every rank sees the same counts, so
// what one rank computes of a peer's segments is what that peer computes itself.
#include <algorithm>
#include <string>

#include "plan/plan.hpp"
#include "support/check.hpp"

namespace wherry {

namespace {

std::size_t at(std::int64_t value) { return static_cast<std::size_t>(value); }

// One slot at its rank: where it begins, how many rows it keeps, and which of them are this plan's. Small:
// a plan finds its memory out of the cache, and this is most of it.
struct Segment {
  std::int32_t begin = 0;
  std::int32_t arrived = 0;  // rows of all sources, before dropping
  std::int32_t kept = 0;     // rows that find room
  std::int32_t mine = 0;     // place of the plan's next row: first, the rows of sources before it
};

class Segments {
 public:
  Segments(const std::vector<CountsOf>& counts, const ExchangeConfig& config,
           const Placement& placement, const Capacity& capacity, int first_source)
      : segments_(at(placement.num_slots())) {
    for (int peer = 0; peer < placement.num_ranks(); ++peer) {
      std::int64_t room = capacity.limit;
      std::int64_t begin = 0;
      for (int slot = placement.slot_begin()[at(peer)]; slot < placement.slot_begin()[at(peer) + 1];
           ++slot) {
        Segment& s = segments_[at(slot)];
        for (std::size_t source = 0; source < counts.size(); ++source) {
          if (source == at(first_source)) s.mine = s.arrived;
          s.arrived += counts[source][at(slot)];
        }
        s.begin = static_cast<std::int32_t>(begin);
        s.kept = s.arrived;
        if (config.layout == Layout::slots) {
          s.kept = smaller(s.arrived, capacity.rows_per_slot);
          begin += capacity.rows_per_slot;
        } else if (config.layout == Layout::grouped) {
          s.kept = smaller(s.arrived, room);
          room -= s.kept;
          const std::int64_t alignment = config.alignment;
          begin += (s.kept + alignment - 1) / alignment * alignment;
        } else {
          begin += s.kept;  // tokens: `limit` counts token rows, checked apart
        }
      }
    }
  }

  [[nodiscard]] const Segment& operator[](std::int64_t slot) const { return segments_[at(slot)]; }
  // The place of the plan's next row among the rows of its slot.
  [[nodiscard]] std::int32_t take(std::int64_t slot) { return segments_[at(slot)].mine++; }

 private:
  [[nodiscard]] static std::int32_t smaller(std::int32_t rows, std::int64_t room) {
    return static_cast<std::int32_t>(std::min<std::int64_t>(rows, room));
  }

  std::vector<Segment> segments_;
};

void check_capacity(const Segments& segments, const std::vector<CountsOf>& counts,
                    const ExchangeConfig& config, const Placement& placement,
                    const Capacity& capacity, int rank) {
  if (config.overflow == Overflow::drop) return;
  for (int peer = 0; peer < placement.num_ranks(); ++peer) {
    const Error::Where where{Stage::plan, rank, peer};
    std::int64_t rows = 0;
    for (int slot = placement.slot_begin()[at(peer)]; slot < placement.slot_begin()[at(peer) + 1];
         ++slot) {
      rows += segments[slot].arrived;
      WHERRY_CHECK(
          config.layout != Layout::slots || segments[slot].arrived <= capacity.rows_per_slot,
          ErrorCode::capacity, where, "slot {} would receive {} rows; rows_per_slot is {}", slot,
          segments[slot].arrived, capacity.rows_per_slot);
    }
    if (config.layout == Layout::tokens) {
      rows = 0;
      for (const CountsOf& source : counts) rows += source[at(placement.num_slots() + peer)];
    }
    WHERRY_CHECK(config.layout == Layout::slots || rows <= capacity.limit, ErrorCode::capacity,
                 where, "rank {} would receive {} rows; receive_rows is {}", peer, rows,
                 capacity.limit);
  }
}

// The sources of the plan's tokens are consecutive ranks from `first_source` on, and their shares
// consecutive tokens: in this order each place follows from the one before, whoever sends the row.
void assign_sends(Segments& segments, const std::vector<CountsOf>& counts,
                  const Placement& placement, int first_source, PlanData& plan) {
  const int ranks = placement.num_ranks();
  std::vector<std::int64_t> next_token_row(at(ranks), 0);
  for (int peer = 0; peer < ranks; ++peer) {
    for (int source = 0; source < first_source; ++source) {
      next_token_row[at(peer)] += counts[at(source)][at(placement.num_slots() + peer)];
    }
  }
  plan.row.assign(plan.dest.size(), -1);
  plan.token_row.assign(plan.dest.size(), -1);
  plan.rows_to.assign(at(ranks), 0);
  plan.token_rows_to.assign(at(ranks), 0);
  plan.dropped.assign(at(placement.num_slots()), 0);
  for (std::int64_t token = 0; token < plan.tokens; ++token) {
    const std::int64_t first = token * plan.topk;
    const bool mine = token >= plan.send_begin && token < plan.send_end;
    for (std::int64_t c = first; c < first + plan.topk; ++c) {
      const std::int32_t dest = plan.dest[at(c)];
      if (dest < 0) continue;
      // An earlier choice of this token may share the slot, or at least the rank.
      std::int64_t same_rank = -1;
      std::int64_t same_slot = -1;
      for (std::int64_t before = first; before < c; ++before) {
        if (plan.dest[at(before)] == dest) same_rank = before;
        if (plan.slot[at(before)] == plan.slot[at(c)]) same_slot = before;
      }
      if (same_rank >= 0) {
        plan.token_row[at(c)] = plan.token_row[at(same_rank)];
      } else {
        plan.token_row[at(c)] = static_cast<std::int32_t>(next_token_row[at(dest)]++);
        if (mine) ++plan.token_rows_to[at(dest)];
      }
      if (same_slot >= 0) {
        plan.row[at(c)] = plan.row[at(same_slot)];
        if (plan.row[at(c)] < 0) plan.weight[at(c)] = 0.0F;
        continue;
      }
      const Segment& segment = segments[plan.slot[at(c)]];
      const std::int32_t place = segments.take(plan.slot[at(c)]);
      if (place < segment.kept) {
        plan.row[at(c)] = segment.begin + place;
        if (mine) ++plan.rows_to[at(dest)];
      } else {
        plan.weight[at(c)] = 0.0F;
        if (mine) ++plan.dropped[at(plan.slot[at(c)])];
      }
    }
  }
}

void assign_receives(const Segments& segments, const std::vector<CountsOf>& counts,
                     const ExchangeConfig& config, const Placement& placement,
                     const Capacity& capacity, int rank, PlanData& plan) {
  const int begin = placement.slot_begin()[at(rank)];
  const int end = placement.slot_begin()[at(rank) + 1];
  plan.slot_counts.clear();
  plan.slot_begin.clear();
  plan.rows_from.assign(counts.size(), 0);
  plan.token_rows_from.clear();
  plan.rows_received = 0;
  plan.token_rows_received = 0;
  std::int64_t stop = 0;
  for (int slot = begin; slot < end; ++slot) {
    const Segment& s = segments[slot];
    plan.slot_counts.push_back(s.kept);
    plan.slot_begin.push_back(s.begin);
    plan.rows_received += s.kept;
    std::int64_t place = 0;
    for (std::size_t source = 0; source < counts.size(); ++source) {
      const std::int64_t rows = counts[source][at(slot)];
      plan.rows_from[source] += std::clamp<std::int64_t>(s.kept - place, 0, rows);
      place += rows;
    }
    const std::int64_t alignment = config.alignment;
    stop = s.begin + (config.layout == Layout::slots
                          ? capacity.rows_per_slot
                          : (s.kept + alignment - 1) / alignment * alignment);
  }
  plan.slot_begin.push_back(stop);
  for (const CountsOf& source : counts) {
    plan.token_rows_from.push_back(source[at(placement.num_slots() + rank)]);
    plan.token_rows_received += plan.token_rows_from.back();
  }
}

}  // namespace

void assign_rows(const std::vector<CountsOf>& counts, const ExchangeConfig& config,
                 const Placement& placement, const Capacity& capacity, int rank, PlanData& plan,
                 std::span<std::int64_t> loads) {
  const int first_source = rank / config.replicated * config.replicated;
  Segments segments(counts, config, placement, capacity, first_source);
  check_capacity(segments, counts, config, placement, capacity, rank);
  for (int slot = 0; slot < placement.num_slots(); ++slot) {
    const int expert = placement.slot_to_expert()[at(slot)];
    if (expert >= 0) loads[at(expert)] += segments[slot].arrived;
  }
  assign_sends(segments, counts, placement, first_source, plan);
  assign_receives(segments, counts, config, placement, capacity, rank, plan);
}

std::string PlanData::to_string(std::int64_t max_tokens) const {
  std::string text = fmt::format("plan: {} tokens, topk {}; receives {} rows ({} token rows)\n",
                                 tokens, topk, rows_received, token_rows_received);
  text += fmt::format("  slot counts [{}], slot begin [{}]\n", fmt::join(slot_counts, " "),
                      fmt::join(slot_begin, " "));
  text += fmt::format("  rows to [{}], token rows to [{}]\n", fmt::join(rows_to, " "),
                      fmt::join(token_rows_to, " "));
  for (std::int64_t token = 0; token < std::min(tokens, max_tokens); ++token) {
    text += fmt::format("  token {}:", token);
    for (std::int64_t c = token * topk; c < (token + 1) * topk; ++c) {
      if (dest[at(c)] < 0) {
        text += " -";
      } else {
        text += fmt::format(" r{}/s{}/{}", dest[at(c)], slot[at(c)], row[at(c)]);
      }
    }
    text += "\n";
  }
  if (tokens > max_tokens) text += fmt::format("  ... {} more tokens\n", tokens - max_tokens);
  return text;
}

}  // namespace wherry
