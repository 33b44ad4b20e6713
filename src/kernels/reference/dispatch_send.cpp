// dispatch_send: every row of x to its places in the windows of the ranks that hold its experts.
// The sender writes every copy itself: here the "link" is the host's own memory, and filling
// further rows from the first copy on the receiver's side would read that copy again.
#include <cstring>

#include "kernels/reference/reference.hpp"

namespace wherry::kernels::reference {

namespace {

bool first_of_rank(const PlanArrays& plan, std::int64_t first, std::int64_t at) {
  for (std::int64_t before = first; before < at; ++before) {
    if (plan.dest[before] == plan.dest[at]) return false;
  }
  return true;
}

void write_entries(const DispatchSend& a, std::int64_t first, std::int64_t at) {
  const Windows& w = a.windows;
  const std::int32_t peer = a.plan.dest[at];
  auto* entries = reinterpret_cast<layout::TokenEntry*>(
      w.base[peer] +
      w.layout.token_entries(w.generation, static_cast<std::uint64_t>(a.plan.token_row[at])));
  for (int k = 0; k < a.plan.topk; ++k) {
    const std::int64_t choice = first + k;
    const bool here = a.plan.dest[choice] == peer;
    const bool counted = a.mode.weights == Weights::multiply || a.plan.repeat[choice] == 0;
    entries[k].position = here && counted ? a.plan.row[choice] : -1;
    entries[k].weight = a.mode.weights == Weights::caller ? 1.0F : a.plan.weight[choice];
  }
}

// The scalar of a row that serves several choices of a token is their sum, in k order.
float row_scalar(const DispatchSend& a, std::int64_t first, std::int64_t at) {
  float sum = 0.0F;
  for (std::int64_t k = at; k < first + a.plan.topk; ++k) {
    if (a.plan.dest[k] == a.plan.dest[at] && a.plan.row[k] == a.plan.row[at])
      sum += a.row_scalars[k];
  }
  return sum;
}

}  // namespace

Moved dispatch_send(const DispatchSend& a, std::int64_t begin, std::int64_t end) {
  const Windows& w = a.windows;
  const layout::WindowLayout& l = w.layout;
  Moved moved;
  const auto send_row = [&](std::int32_t peer, std::int32_t row, const std::byte* x) {
    copy_row(w.base[peer] + l.row(w.generation, static_cast<std::uint64_t>(row)), x,
             static_cast<std::int64_t>(l.row_bytes));
    ++moved.rows;
    moved.link_rows += peer != w.rank ? 1 : 0;
  };
  for (std::int64_t token = begin; token < end; ++token) {
    const std::byte* x = a.x + token * a.x_pitch;
    const std::int64_t first = token * a.plan.topk;
    for (std::int64_t at = first; at < first + a.plan.topk; ++at) {
      const std::int32_t peer = a.plan.dest[at];
      if (peer < 0) continue;
      if (a.mode.sends_entries() && a.plan.token_row[at] >= 0 && first_of_rank(a.plan, first, at)) {
        write_entries(a, first, at);
        if (a.mode.sends_token_rows()) send_row(peer, a.plan.token_row[at], x);
      }
      if (a.plan.row[at] < 0 || a.plan.repeat[at] != 0) continue;
      if (!a.mode.sends_token_rows()) send_row(peer, a.plan.row[at], x);
      if (a.row_scalars != nullptr) {
        const float scalar = row_scalar(a, first, at);
        const auto row = static_cast<std::uint64_t>(a.plan.row[at]);
        std::memcpy(w.base[peer] + l.scalar(w.generation, row), &scalar, sizeof(scalar));
      }
    }
  }
  return moved;
}

void copy_row(std::byte* to, const std::byte* from, std::int64_t bytes) {
  std::memcpy(to, from, static_cast<std::size_t>(bytes));
}

}  // namespace wherry::kernels::reference
