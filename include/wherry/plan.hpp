// Stage 2, plan: where every row of one routing goes. A plan is data: it holds this rank's send
// offsets and its receive counts, and can be used by many dispatches and combines, or by none.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace wherry {

// The contents of a plan on the host. Rows are counted, never bytes.
struct PlanData {
  std::int64_t tokens = 0;
  int topk = 0;

  // The tokens that this rank dispatches, [send_begin, send_end): all of them, unless
  // ExchangeConfig::replicated ranks share them; and those whose sums combine gives it.
  std::int64_t send_begin = 0, send_end = 0;
  std::int64_t home_begin = 0, home_end = 0;

  // Where each token's rows go, whichever rank sends them, one entry per (token, k), [tokens, topk]. -1: no expert, or dropped.
  std::vector<std::int32_t> dest;       // rank that holds the slot
  std::vector<std::int32_t> slot;       // slot, global number
  std::vector<std::int32_t> row;        // place among that rank's grouped rows (or its slots rows)
  std::vector<std::int32_t> token_row;  // place among that rank's token rows
  std::vector<float> weight;            // routing weight; 0 where dropped

  // Set where choice k shares its row with an earlier choice of the same token (the same slot
  // twice): the row travels once, both weights count. [tokens, topk]
  std::vector<std::uint8_t> repeat;

  // What this rank receives.
  std::vector<std::int64_t> slot_counts;      // rows of each local slot
  std::vector<std::int64_t> slot_begin;       // first row of each local slot, [slots_local + 1]
  std::vector<std::int64_t> token_rows_from;  // token rows from each rank, [ranks]
  std::vector<std::int64_t> rows_from;        // (token, slot) rows from each rank, [ranks]
  std::int64_t rows_received = 0;             // sum of slot_counts
  std::int64_t token_rows_received = 0;       // sum of token_rows_from

  // What this rank sends, per destination rank, [ranks].
  std::vector<std::int64_t> rows_to;        // (token, slot) rows
  std::vector<std::int64_t> token_rows_to;  // (token, rank) rows

  // Rows of the tokens that this rank dispatches that found no room under Overflow::drop, per slot (all slots).
  std::vector<std::int64_t> dropped;

  [[nodiscard]] bool operator==(const PlanData&) const = default;
  // A table a person can read; at most `max_tokens` tokens.
  [[nodiscard]] std::string to_string(std::int64_t max_tokens = 16) const;
};

class DevicePlan;
class Exchange;

// Made by Exchange::make_plan(), filled by Exchange::plan(). Movable; must not outlive its exchange
// in use, but may be destroyed after it.
class Plan {
 public:
  Plan() = default;

  [[nodiscard]] bool valid() const noexcept { return filled_; }
  [[nodiscard]] std::int64_t tokens() const noexcept { return data_.tokens; }
  // Tokens whose sums combine gives this rank: all, or its share under CombineTo::share.
  [[nodiscard]] std::int64_t home_tokens() const noexcept {
    return data_.home_end - data_.home_begin;
  }
  // The contents; empty until filled, and after a plan() that threw. On CUDA, where plan() does not
  // wait: waits until it has run, copies the contents to the host (all but rows_from), and throws
  // what was found in the data: bad_argument, bad_routing, capacity, config_mismatch (placements),
  // on every rank. Not while a stream is captured.
  [[nodiscard]] const PlanData& to_host() const;
  // Whether to_host() would not have to wait.
  [[nodiscard]] bool ready() const;

 private:
  friend class Exchange;
  PlanData data_;
  std::uint64_t exchange_id_ = 0;  // of the exchange that made it
  std::uint64_t serial_ = 0;       // which plan() filled it; the same on every rank
  std::uint64_t placement_ = 0;    // which placement of its exchange it was filled under
  bool filled_ = false;
  std::shared_ptr<DevicePlan> device_;  // CUDA: where the contents are
};

}  // namespace wherry
