// What holds for the plans of a group, whatever its routing: every routed (token, slot) gets one row
// or is counted as dropped, in the order the design promises. Computed from the routing alone, the
// slow way; of the library only the choice of replica is used.
#pragma once

#include <fmt/format.h>

#include <set>
#include <stdexcept>
#include <string>
#include <utility>

#include "support/plan_cases.hpp"

namespace wherry::test {

class PlanChecker {
 public:
  PlanChecker(const PlanCase& plan_case, const Planned& planned) : c_(plan_case), p_(planned) {}

  // Throws a sentence that says what is wrong.
  void check() {
    gather();
    check_counts();
    const bool fits = place();
    for (int rank = 0; rank < c_.ranks; ++rank) {
      const auto& error = p_.errors[at(rank)];
      require(fits == !error.has_value() && (fits || *error == ErrorCode::capacity),
              "rank {}: rows {}, but assign_rows() says '{}'", rank, fits ? "fit" : "do not fit",
              error.has_value() ? name(*error) : "good");
    }
    if (!fits) return;
    for (int rank = 0; rank < c_.ranks; ++rank) {
      check_sends(rank);
      check_receives(rank);
    }
    check_loads();
  }

 private:
  // One row: the first choice of a token that names the slot.
  struct Row {
    int source;
    std::int64_t token;
    int k;
  };

  template <typename T>
  static std::size_t at(T value) {
    return static_cast<std::size_t>(value);
  }
  template <typename... Args>
  static void require(bool good, fmt::format_string<Args...> text, Args&&... args) {
    if (!good) throw std::runtime_error(fmt::format(text, std::forward<Args>(args)...));
  }
  [[nodiscard]] const Routing& routing(int rank) const { return c_.routings[at(rank)].view; }
  // Which of the ranks that hold a token of `rank` sends it, by the shares of the set.
  [[nodiscard]] int sender_of(int rank, std::int64_t token) const {
    const int replicated = c_.config.replicated;
    const int first = rank / replicated * replicated;
    int place = 0;
    while (routing(rank).tokens * (place + 1) / replicated <= token) ++place;
    return first + place;
  }
  [[nodiscard]] int slot_of(std::int64_t id, std::int64_t token, int sender) const {
    if (c_.config.expert_ids == ExpertIds::physical) return static_cast<int>(id);
    return p_.placement.slot_for(static_cast<int>(id), token, sender);
  }
  [[nodiscard]] int rank_of(int slot) const {
    int rank = 0;
    while (p_.placement.slot_begin()[at(rank) + 1] <= slot) ++rank;
    return rank;
  }

  // Who arrives at each slot and, as token rows, at each rank: by source rank, token, k.
  void gather() {
    arrivals_.resize(at(p_.placement.num_slots()));
    token_rows_.resize(at(c_.ranks));
    for (int source = 0; source < c_.ranks; ++source) {
      for (std::int64_t token = 0; token < routing(source).tokens; ++token) {
        if (sender_of(source, token) != source) continue;
        std::set<int> slots;
        std::set<int> ranks;
        for (int k = 0; k < c_.config.topk; ++k) {
          const std::int64_t id = routing(source).id(token, k);
          if (id < 0) continue;
          const int slot = slot_of(id, token, source);
          if (slots.insert(slot).second) arrivals_[at(slot)].push_back({source, token, k});
          if (ranks.insert(rank_of(slot)).second) {
            token_rows_[at(rank_of(slot))].emplace_back(source, token);
          }
        }
      }
    }
  }

  void check_counts() const {
    for (int rank = 0; rank < c_.ranks; ++rank) {
      const auto& entries = p_.entries[at(rank)];
      for (int slot = 0; slot < p_.placement.num_slots(); ++slot) {
        const auto rows = std::ranges::count(arrivals_[at(slot)], rank, &Row::source);
        require(entries[at(slot)] == rows, "rank {} counts {} rows for slot {}, expected {}", rank,
                entries[at(slot)], slot, rows);
      }
      for (int peer = 0; peer < c_.ranks; ++peer) {
        const auto rows =
            std::ranges::count(token_rows_[at(peer)], rank, &std::pair<int, std::int64_t>::first);
        const auto counted = entries[at(p_.placement.num_slots() + peer)];
        require(counted == rows, "rank {} counts {} token rows for rank {}, expected {}", rank,
                counted, peer, rows);
      }
    }
  }

  // Where the design puts each arrival; false if Overflow::error must refuse.
  bool place() {
    const ExchangeConfig& config = c_.config;
    const auto slots = p_.placement.num_slots();
    kept_.assign(at(slots), 0);
    begin_.assign(at(slots), 0);
    end_.assign(at(c_.ranks), 0);
    for (int rank = 0; rank < c_.ranks; ++rank) {
      std::int64_t room = config.receive_rows > 0 ? config.receive_rows : INT32_MAX;
      std::int64_t next = 0;
      if (config.layout == Layout::tokens && std::ssize(token_rows_[at(rank)]) > room) return false;
      for (int slot = p_.placement.slot_begin()[at(rank)];
           slot < p_.placement.slot_begin()[at(rank) + 1]; ++slot) {
        const std::int64_t came = std::ssize(arrivals_[at(slot)]);
        const std::int64_t most = config.layout == Layout::slots     ? p_.capacity.rows_per_slot
                                  : config.layout == Layout::grouped ? room
                                                                     : came;
        kept_[at(slot)] = std::min(came, most);
        if (came > most && config.overflow == Overflow::error) return false;
        begin_[at(slot)] = next;
        room -= config.layout == Layout::grouped ? kept_[at(slot)] : 0;
        next += config.layout == Layout::slots ? most : kept_[at(slot)];
        next += (config.alignment - next % config.alignment) % config.alignment;
      }
      end_[at(rank)] = next;
    }
    return true;
  }

  void check_sends(int rank) {
    const PlanData& plan = p_.plans[at(rank)];
    require(plan.tokens == routing(rank).tokens && plan.topk == c_.config.topk,
            "rank {}: plan of {} tokens, topk {}", rank, plan.tokens, plan.topk);
    std::vector<std::int64_t> rows_to(at(c_.ranks), 0);
    std::vector<std::int64_t> dropped(at(p_.placement.num_slots()), 0);
    check_shares(rank);
    for (std::int64_t token = 0; token < plan.tokens; ++token) {
      const int sender = sender_of(rank, token);
      const bool mine = sender == rank;
      std::set<int> seen;
      for (int k = 0; k < plan.topk; ++k) {
        const auto choice = at(token * plan.topk + k);
        const std::int64_t id = routing(rank).id(token, k);
        const std::string where = fmt::format("rank {}, token {}, choice {}", rank, token, k);
        if (id < 0) {
          require(plan.dest[choice] == -1 && plan.row[choice] == -1 &&
                      plan.token_row[choice] == -1 && plan.weight[choice] == 0.0F,
                  "{}: no expert, but {} of rank {}", where, plan.row[choice], plan.dest[choice]);
          continue;
        }
        const int slot = plan.slot[choice];
        const bool physical = c_.config.expert_ids == ExpertIds::physical;
        require(slot >= 0 && slot < p_.placement.num_slots() &&
                    (physical ? slot : p_.placement.slot_to_expert()[at(slot)]) == id,
                "{}: slot {} does not serve id {}", where, slot, id);
        const int dest = rank_of(slot);
        require(plan.dest[choice] == dest, "{}: rank {}, but slot {} is on rank {}", where,
                plan.dest[choice], slot, dest);
        const bool first = seen.insert(slot).second;
        require((plan.repeat[choice] == 0) == first, "{}: repeat is {}", where,
                plan.repeat[choice]);
        const std::int64_t place = place_of(slot, sender, token);
        const bool kept = place < kept_[at(slot)];
        const std::int64_t row = kept ? begin_[at(slot)] + place : -1;
        require(plan.row[choice] == row, "{}: row {}, expected {}", where, plan.row[choice], row);
        const float weight = kept ? routing(rank).weight(token, k) : 0.0F;
        require(plan.weight[choice] == weight, "{}: weight {}, expected {}", where,
                plan.weight[choice], weight);
        const std::int64_t token_row = token_row_of(dest, sender, token);
        require(plan.token_row[choice] == token_row, "{}: token row {}, expected {}", where,
                plan.token_row[choice], token_row);
        if (!first || !mine) continue;
        rows_to[at(dest)] += kept ? 1 : 0;
        dropped[at(slot)] += kept ? 0 : 1;
        require(!kept || taken_.insert({dest, row}).second, "{}: row {} of rank {} is taken", where,
                row, dest);
      }
    }
    require(plan.rows_to == rows_to, "rank {}: rows_to is [{}], expected [{}]", rank,
            fmt::join(plan.rows_to, " "), fmt::join(rows_to, " "));
    require(plan.dropped == dropped, "rank {}: dropped is [{}], expected [{}]", rank,
            fmt::join(plan.dropped, " "), fmt::join(dropped, " "));
  }

  // The shares of a set follow one another and are all its tokens.
  void check_shares(int rank) const {
    const PlanData& plan = p_.plans[at(rank)];
    const int place = rank % c_.config.replicated;
    const std::int64_t before = place == 0 ? 0 : p_.plans[at(rank - 1)].send_end;
    require(plan.send_begin == before && plan.send_end >= before,
            "rank {} sends tokens [{}, {}), the one before ends at {}", rank, plan.send_begin,
            plan.send_end, before);
    require(place + 1 < c_.config.replicated || plan.send_end == plan.tokens,
            "the set of rank {} sends {} of {} tokens", rank, plan.send_end, plan.tokens);
    const bool share = c_.config.combine_to == CombineTo::share;
    require(plan.home_begin == (share ? plan.send_begin : 0) &&
                plan.home_end == (share ? plan.send_end : plan.tokens),
            "rank {} gets the sums of [{}, {})", rank, plan.home_begin, plan.home_end);
  }

  void check_receives(int rank) const {
    const PlanData& plan = p_.plans[at(rank)];
    const int first = p_.placement.slot_begin()[at(rank)];
    const int local = p_.placement.num_local_slots(rank);
    require(std::ssize(plan.slot_counts) == local && std::ssize(plan.slot_begin) == local + 1,
            "rank {} has {} slots; {} counts, {} begins", rank, local, plan.slot_counts.size(),
            plan.slot_begin.size());
    std::int64_t total = 0;
    for (int s = 0; s < local; ++s) {
      require(plan.slot_counts[at(s)] == kept_[at(first + s)] &&
                  plan.slot_begin[at(s)] == begin_[at(first + s)],
              "rank {}, slot {}: {} rows from {}, expected {} from {}", rank, first + s,
              plan.slot_counts[at(s)], plan.slot_begin[at(s)], kept_[at(first + s)],
              begin_[at(first + s)]);
      total += plan.slot_counts[at(s)];
    }
    require(plan.slot_begin.back() == end_[at(rank)], "rank {}: rows end at {}, expected {}", rank,
            plan.slot_begin.back(), end_[at(rank)]);
    require(plan.rows_received == total, "rank {}: {} rows received, slots hold {}", rank,
            plan.rows_received, total);
    const auto room = static_cast<std::int64_t>(p_.capacity.params.scalar_capacity);
    require(plan.slot_begin.back() <= room, "rank {}: {} rows in a window of {}", rank,
            plan.slot_begin.back(), room);
    std::int64_t token_rows = 0;
    for (int peer = 0; peer < c_.ranks; ++peer) {
      const PlanData& sender = p_.plans[at(peer)];
      require(plan.rows_from[at(peer)] == sender.rows_to[at(rank)],
              "rank {} expects {} rows of rank {}, which sends {}", rank, plan.rows_from[at(peer)],
              peer, sender.rows_to[at(rank)]);
      require(plan.token_rows_from[at(peer)] == sender.token_rows_to[at(rank)],
              "rank {} expects {} token rows of rank {}, which sends {}", rank,
              plan.token_rows_from[at(peer)], peer, sender.token_rows_to[at(rank)]);
      token_rows += plan.token_rows_from[at(peer)];
    }
    require(
        token_rows == std::ssize(token_rows_[at(rank)]) && plan.token_rows_received == token_rows,
        "rank {}: {} token rows, expected {}", rank, token_rows, token_rows_[at(rank)].size());
  }

  void check_loads() const {
    std::vector<std::int64_t> loads(at(c_.config.experts), 0);
    for (int slot = 0; slot < p_.placement.num_slots(); ++slot) {
      const int expert = p_.placement.slot_to_expert()[at(slot)];
      if (expert >= 0) loads[at(expert)] += std::ssize(arrivals_[at(slot)]);
    }
    for (int rank = 0; rank < c_.ranks; ++rank) {
      require(p_.loads[at(rank)] == loads, "rank {}: loads [{}], expected [{}]", rank,
              fmt::join(p_.loads[at(rank)], " "), fmt::join(loads, " "));
    }
  }

  [[nodiscard]] std::int64_t place_of(int slot, int source, std::int64_t token) const {
    const auto found = std::ranges::find_if(arrivals_[at(slot)], [&](const Row& row) {
      return row.source == source && row.token == token;
    });
    require(found != arrivals_[at(slot)].end(), "rank {}, token {} should not be in slot {}",
            source, token, slot);
    return found - arrivals_[at(slot)].begin();
  }
  [[nodiscard]] std::int64_t token_row_of(int dest, int source, std::int64_t token) const {
    const auto& rows = token_rows_[at(dest)];
    return std::ranges::find(rows, std::pair{source, token}) - rows.begin();
  }

  const PlanCase& c_;
  const Planned& p_;
  std::vector<std::vector<Row>> arrivals_;                             // [slots]
  std::vector<std::vector<std::pair<int, std::int64_t>>> token_rows_;  // [ranks] (source, token)
  std::vector<std::int64_t> kept_, begin_;                             // [slots]
  std::vector<std::int64_t> end_;                                      // [ranks]
  std::set<std::pair<int, std::int64_t>> taken_;                       // (rank, row)
};

}  // namespace wherry::test
