// Which result rows make up an output row, shared by the CPU kernel sets: they differ in how the
// rows are summed.
#pragma once

#include <cstring>
#include <vector>

#include "kernels/stages.hpp"

namespace wherry::kernels {

// How the rows of a RowSum become one row (docs/numerics.md). All sums start at +0.
enum class SumRule : std::uint8_t {
  weighted,  // acc = fma(weight, row, acc), rounded once
  plain,     // acc = acc + row, rounded once
  per_rank,  // weighted within each rank and rounded; then plain over the ranks, rounded
};

// The rows that are summed into one output row, in order.
struct RowSum {
  const std::byte* rows[kMaxTopk];
  const std::byte* scales[kMaxTopk];  // of each row, where rows are converted on the way home
  float weights[kMaxTopk];
  std::int32_t peers[kMaxTopk];
  bool ends_rank[kMaxTopk];  // per_rank: the last row of its rank
  int count = 0;

  void add(std::int32_t peer, const std::byte* row, const std::byte* scale, float weight) noexcept {
    put(count++, peer, row, scale, weight);
  }
  // Inserts by rank, after the rows of the same rank. topk is small and the list nearly sorted.
  void add_by_rank(std::int32_t peer, const std::byte* row, const std::byte* scale,
                   float weight) noexcept {
    int place = count++;
    for (; place > 0 && peers[place - 1] > peer; --place) {
      put(place, peers[place - 1], rows[place - 1], scales[place - 1], weights[place - 1]);
    }
    put(place, peer, row, scale, weight);
  }
  void put(int place, std::int32_t peer, const std::byte* row, const std::byte* scale,
           float weight) noexcept {
    peers[place] = peer;
    rows[place] = row;
    scales[place] = scale;
    weights[place] = weight;
  }
  [[nodiscard]] bool has_peer(std::int32_t peer) const noexcept {
    for (int i = 0; i < count; ++i) {
      if (peers[i] == peer) return true;
    }
    return false;
  }
};

[[nodiscard]] inline SumRule recv_rule(const Mode& mode) noexcept {
  if (mode.reduction == Reduction::by_token) return SumRule::weighted;
  return mode.pulls_partials() ? SumRule::plain : SumRule::per_rank;
}

// combine_recv: what goes into token `token` at home.
inline void find_token_rows(const CombineRecv& a, std::int64_t token, RowSum& sum) noexcept {
  const Windows& w = a.windows;
  const PlanArrays& plan = a.plan;
  const SumRule rule = recv_rule(a.mode);
  sum.count = 0;
  for (std::int64_t at = token * plan.topk; at < (token + 1) * plan.topk; ++at) {
    if (plan.row[at] < 0) continue;
    const std::int32_t peer = plan.dest[at];
    if (rule == SumRule::plain) {
      if (sum.has_peer(peer)) continue;
      const auto row = static_cast<std::uint64_t>(plan.token_row[at]);
      const std::uint64_t place = a.mode.sums_partials() ? w.layout.partial(w.generation, row)
                                                         : w.layout.result(w.generation, row);
      sum.add_by_rank(peer, w.base[peer] + place,
                      w.base[peer] + w.layout.home_scale(w.generation, row), 1.0F);
      continue;
    }
    // A row that serves two choices was multiplied by both weights by a caller that multiplies.
    const bool caller = a.mode.weights == Weights::caller;
    if (caller && plan.repeat[at] != 0) continue;
    const auto row = static_cast<std::uint64_t>(plan.row[at]);
    const std::byte* const from = w.base[peer] + w.layout.result(w.generation, row);
    const std::byte* const scale = w.base[peer] + w.layout.home_scale(w.generation, row);
    const float weight = caller ? 1.0F : plan.weight[at];
    rule == SumRule::weighted ? sum.add(peer, from, scale, weight)
                              : sum.add_by_rank(peer, from, scale, weight);
  }
  for (int i = 0; i < sum.count; ++i) {
    sum.ends_rank[i] = i + 1 == sum.count || sum.peers[i] != sum.peers[i + 1];
  }
}

// combine_send: what this rank has of received token row `row`.
inline void find_partial_rows(const CombineSend& a, std::int64_t row, RowSum& sum) noexcept {
  const Windows& w = a.windows;
  const std::byte* const base = w.base[w.rank];
  const auto* entries = reinterpret_cast<const layout::TokenEntry*>(
      base + w.layout.token_entries(w.generation, static_cast<std::uint64_t>(row)));
  sum.count = 0;
  for (int k = 0; k < a.topk; ++k) {
    if (entries[k].position < 0) continue;
    const auto at = static_cast<std::uint64_t>(entries[k].position);
    sum.add(w.rank, base + w.layout.result(w.generation, at), nullptr, entries[k].weight);
  }
}

[[nodiscard]] inline std::byte* partial_row(const CombineSend& a, std::int64_t row) noexcept {
  const Windows& w = a.windows;
  return w.base[w.rank] + w.layout.partial(w.generation, static_cast<std::uint64_t>(row));
}
[[nodiscard]] inline std::byte* partial_scale(const CombineSend& a, std::int64_t row) noexcept {
  const Windows& w = a.windows;
  return w.base[w.rank] + w.layout.home_scale(w.generation, static_cast<std::uint64_t>(row));
}

// Rows that are converted on the way home, between the wire and sums. Memory for one call of a kernel:
// the rows of one token stay in the cache between conversion and sum.
class SumRows {
 public:
  SumRows(const Mode& mode, int rows)
      : format_(mode.sum_format()),
        pitch_(mode.converts_home() ? mode.hidden * dtype_bytes(format_.dtype) : 0),
        memory_(static_cast<std::size_t>(pitch_ * rows)) {}

  // Replaces the rows of `sum` by what they are worth: dequantize(format, payload, scales, x).
  template <typename Dequantize>
  void widen(RowSum& sum, Dequantize dequantize) {
    for (int i = 0; i < sum.count; ++i) {
      dequantize(format_, sum.rows[i], sum.scales[i], row(i));
      sum.rows[i] = row(i);
    }
  }
  [[nodiscard]] std::byte* row(int i) noexcept { return memory_.data() + i * pitch_; }
  [[nodiscard]] const WireFormat& format() const noexcept { return format_; }

 private:
  WireFormat format_;
  std::int64_t pitch_;
  std::vector<std::byte> memory_;
};

inline void count_moved(const CombineRecv& a, const RowSum& sum, Moved& moved) noexcept {
  moved.rows += sum.count;
  for (int i = 0; i < sum.count; ++i) moved.link_rows += sum.peers[i] != a.windows.rank ? 1 : 0;
}

inline void fetch_scalars(const CombineRecv& a, std::int64_t token) noexcept {
  const Windows& w = a.windows;
  for (std::int64_t at = token * a.plan.topk; at < (token + 1) * a.plan.topk; ++at) {
    float scalar = 0.0F;
    if (a.plan.row[at] >= 0) {
      const auto row = static_cast<std::uint64_t>(a.plan.row[at]);
      std::memcpy(&scalar, w.base[a.plan.dest[at]] + w.layout.result_scalar(w.generation, row),
                  sizeof(scalar));
    }
    a.scalars_out[at] = scalar;
  }
}

}  // namespace wherry::kernels
