// dispatch_recv: what is left to do for rows that have arrived in their final places.
#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels/reference/reference.hpp"
#include "kernels/wires.hpp"

namespace wherry::kernels::reference {

namespace {

// A GEMM reads whole segments: padding rows must not carry NaN of an earlier step.
void zero_padding(const DispatchRecv& a) {
  const Windows& w = a.windows;
  const WireFormat& format = a.mode.dispatch_wire;
  const std::vector<std::byte> no_scales(static_cast<std::size_t>(format.scale_bytes));
  for (std::size_t s = 0; s < a.slot_counts.size(); ++s) {
    for (std::int64_t row = a.slot_begin[s] + a.slot_counts[s]; row < a.slot_begin[s + 1]; ++row) {
      const auto at = static_cast<std::uint64_t>(row);
      std::memset(w.base[w.rank] + w.layout.row(w.generation, at), 0, w.layout.row_pitch);
      put_scales(format, w.base[w.rank] + w.layout.scale_plane(w.generation),
                 static_cast<std::int64_t>(w.layout.row_capacity), row, no_scales.data());
      std::memset(w.base[w.rank] + w.layout.scalar(w.generation, at), 0, sizeof(float));
    }
  }
}

void list_choices(const DispatchRecv& a) {
  const Windows& w = a.windows;
  for (std::int64_t row = 0; row < a.token_rows; ++row) {
    const auto* entries = reinterpret_cast<const layout::TokenEntry*>(
        w.base[w.rank] + w.layout.token_entries(w.generation, static_cast<std::uint64_t>(row)));
    for (int k = 0; k < a.topk; ++k) {
      const std::int32_t position = entries[k].position;
      Received::TokenChoice& choice = a.choices[row * a.topk + k];
      choice = {-1, entries[k].weight, position};
      if (position < 0) continue;
      // The last slot that begins at or before the position; empty slots before it are skipped.
      const auto after =
          std::upper_bound(a.slot_begin.begin(), a.slot_begin.end(), std::int64_t{position});
      choice.local_slot = static_cast<std::int32_t>(after - a.slot_begin.begin()) - 1;
      a.gather[position] = static_cast<std::int32_t>(row);
    }
  }
}

}  // namespace

void dispatch_recv(const DispatchRecv& a) {
  switch (a.mode.layout) {
    case Layout::grouped: zero_padding(a); return;
    case Layout::tokens: list_choices(a); return;
    case Layout::slots: return;
  }
}

}  // namespace wherry::kernels::reference
