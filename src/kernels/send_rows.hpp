// The walk of dispatch_send over the plan, shared by the CPU kernel sets: they differ in how one row
// is converted and copied.
//
// The sender writes every copy itself: here the "link" is the host's own memory, and filling further
// rows from the first copy on the receiver's side would read that copy again.
#pragma once

#include <cstring>
#include <vector>

#include "kernels/stages.hpp"
#include "kernels/wires.hpp"

namespace wherry::kernels {

namespace send {

[[nodiscard]] inline bool first_of_rank(const PlanArrays& plan, std::int64_t first,
                                        std::int64_t at) noexcept {
  for (std::int64_t before = first; before < at; ++before) {
    if (plan.dest[before] == plan.dest[at]) return false;
  }
  return true;
}

inline void write_entries(const DispatchSend& a, std::int64_t first, std::int64_t at) noexcept {
  const Windows& w = a.windows;
  const std::int32_t peer = a.plan.dest[at];
  const auto row = static_cast<std::uint64_t>(a.plan.token_row[at]);
  auto* entries = reinterpret_cast<layout::TokenEntry*>(w.base[peer] +
                                                        w.layout.token_entries(w.generation, row));
  for (int k = 0; k < a.plan.topk; ++k) {
    const std::int64_t choice = first + k;
    const bool here = a.plan.dest[choice] == peer;
    const bool counted = a.mode.weights == Weights::multiply || a.plan.repeat[choice] == 0;
    entries[k].position = here && counted ? a.plan.row[choice] : -1;
    entries[k].weight = a.mode.weights == Weights::caller ? 1.0F : a.plan.weight[choice];
  }
}

// The scalar of a row that serves several choices of a token is their sum, in k order.
inline void write_scalar(const DispatchSend& a, std::int64_t first, std::int64_t at) noexcept {
  float sum = 0.0F;
  for (std::int64_t k = at; k < first + a.plan.topk; ++k) {
    if (a.plan.dest[k] == a.plan.dest[at] && a.plan.row[k] == a.plan.row[at]) {
      sum += a.row_scalars[k];
    }
  }
  const Windows& w = a.windows;
  const auto row = static_cast<std::uint64_t>(a.plan.row[at]);
  std::memcpy(w.base[a.plan.dest[at]] + w.layout.scalar(w.generation, row), &sum, sizeof(sum));
}

// The rows of x as they travel: a token is converted once, into memory that stays in the cache while
// it is copied to its ranks.
template <typename Quantize>
class WireSource {
 public:
  WireSource(const DispatchSend& send, Quantize quantize)
      : send_(send),
        quantize_(quantize),
        converts_(send.mode.converts_rows() && !send.converted),
        payload_(bytes(converts_ ? format().payload_bytes : 0)),
        scales_(bytes(format().scale_bytes)) {}

  // The payload of token `token`, valid until the next call; scales() are its scales.
  const std::byte* row(std::int64_t token) {
    const std::byte* const x = send_.x + token * send_.x_pitch;
    if (converts_) {
      quantize_(format(), x, payload_.data(), scales_.data());
      if (token + 1 < send_.plan.tokens) prefetch(x + send_.x_pitch);
      return payload_.data();
    }
    if (send_.converted) {
      get_scales(format(), send_.x_scales, send_.plan.tokens, token, scales_.data());
    }
    return x;
  }
  [[nodiscard]] const std::byte* scales() const noexcept { return scales_.data(); }
  [[nodiscard]] const WireFormat& format() const noexcept { return send_.mode.dispatch_wire; }

 private:
  static std::size_t bytes(std::int64_t count) { return static_cast<std::size_t>(count); }

  // The next token comes out of memory while this one is copied. Measured: -7 % of the send.
  void prefetch(const std::byte* x) const {
    constexpr std::int64_t kLine = 64;
    const std::int64_t row_bytes = format().hidden * dtype_bytes(format().dtype);
    for (std::int64_t at = 0; at < row_bytes; at += kLine) __builtin_prefetch(x + at, 0, 2);
  }

  const DispatchSend& send_;
  Quantize quantize_;
  bool converts_;
  std::vector<std::byte> payload_;
  std::vector<std::byte> scales_;
};

}  // namespace send

// quantize(format, x, payload, scales) is the set's quantize_row; copy_row(to, from, bytes) copies one
// payload row.
template <typename Quantize, typename CopyRow>
Moved send_rows(const DispatchSend& a, std::int64_t begin, std::int64_t end, Quantize quantize,
                CopyRow copy_row) {
  const Windows& w = a.windows;
  const layout::WindowLayout& l = w.layout;
  send::WireSource source(a, quantize);
  Moved moved;
  const auto send_row = [&](std::int32_t peer, std::int32_t row, const std::byte* payload) {
    copy_row(w.base[peer] + l.row(w.generation, static_cast<std::uint64_t>(row)), payload,
             static_cast<std::int64_t>(l.row_bytes));
    put_scales(source.format(), w.base[peer] + l.scale_plane(w.generation),
               static_cast<std::int64_t>(l.row_capacity), row, source.scales());
    ++moved.rows;
    moved.link_rows += peer != w.rank ? 1 : 0;
  };
  for (std::int64_t token = begin; token < end; ++token) {
    const std::int64_t first = token * a.plan.topk;
    const std::byte* payload = nullptr;  // none yet: a token without expert is not converted
    for (std::int64_t at = first; at < first + a.plan.topk; ++at) {
      const std::int32_t peer = a.plan.dest[at];
      if (peer < 0) continue;
      if (payload == nullptr) payload = source.row(token);
      if (a.mode.sends_entries() && a.plan.token_row[at] >= 0 &&
          send::first_of_rank(a.plan, first, at)) {
        send::write_entries(a, first, at);
        if (a.mode.sends_token_rows()) send_row(peer, a.plan.token_row[at], payload);
      }
      if (a.plan.row[at] < 0 || a.plan.repeat[at] != 0) continue;
      if (!a.mode.sends_token_rows()) send_row(peer, a.plan.row[at], payload);
      if (a.row_scalars != nullptr) send::write_scalar(a, first, at);
    }
  }
  return moved;
}

}  // namespace wherry::kernels
