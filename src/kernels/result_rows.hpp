// Which result rows make up an output row, shared by the CPU kernel sets: they differ in how the
// rows are summed.
#pragma once

#include <cstring>

#include "kernels/stages.hpp"

namespace wherry::kernels {

// The rows that are summed into one output row, in order, and their weights.
struct RowSum {
  const std::byte* rows[kMaxTopk];
  float weights[kMaxTopk];
  int count = 0;
};

// combine_recv: what goes into token `token` at home.
inline void find_token_rows(const CombineRecv& a, std::int64_t token, RowSum& sum) noexcept {
  const Windows& w = a.windows;
  Source sources[kMaxTopk];
  sum.count = sources_of(a.plan, a.mode, token, sources);
  for (int i = 0; i < sum.count; ++i) {
    const auto row = static_cast<std::uint64_t>(sources[i].row);
    const std::uint64_t at = a.mode.sums_partials() ? w.layout.partial(w.generation, row)
                                                    : w.layout.result(w.generation, row);
    sum.rows[i] = w.base[sources[i].peer] + at;
    sum.weights[i] = sources[i].weight;
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
    sum.rows[sum.count] =
        base + w.layout.result(w.generation, static_cast<std::uint64_t>(entries[k].position));
    sum.weights[sum.count] = entries[k].weight;
    ++sum.count;
  }
}

[[nodiscard]] inline std::byte* partial_row(const CombineSend& a, std::int64_t row) noexcept {
  const Windows& w = a.windows;
  return w.base[w.rank] + w.layout.partial(w.generation, static_cast<std::uint64_t>(row));
}

// Whether combine_recv multiplies: by_rank's partial rows carry their weights already.
[[nodiscard]] inline bool is_weighted(const Mode& mode) noexcept {
  return mode.reduction == Reduction::by_token;
}

// Counts the rows of one token as moved.
inline void count_moved(const CombineRecv& a, const RowSum& sum, Moved& moved) noexcept {
  const Windows& w = a.windows;
  const std::byte* const own = w.base[w.rank];
  moved.rows += sum.count;
  for (int i = 0; i < sum.count; ++i) {
    const bool mine = sum.rows[i] >= own && sum.rows[i] < own + w.layout.bytes;
    moved.link_rows += mine ? 0 : 1;
  }
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
