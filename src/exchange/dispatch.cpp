// Stage 3: dispatch and its halves.
#include <cstring>
#include <numeric>
#include <utility>

#include "exchange/state.hpp"
#include "support/check.hpp"

namespace wherry {

using layout::Channel;

Exchange::DispatchHandle Exchange::dispatch_begin(const Plan& plan, ConstTensorView x,
                                                  const DispatchOptions& options) {
  State& s = *state_;
  s.check();
  s.check_plan(plan, Stage::dispatch_send);
  s.check_tensor(Stage::dispatch_send, s.steps + 1, "x", x, plan.tokens());
  if (options.out.data != nullptr) s.check_out(options.out, plan.to_host());
  Generation& g = s.enter(Stage::dispatch_send, false);
  const std::uint64_t index = s.generation_of(g.step);
  const PlanData& data = plan.to_host();

  const auto& rows_to = s.mode.sends_token_rows() ? data.token_rows_to : data.rows_to;
  const std::int64_t rows = std::accumulate(rows_to.begin(), rows_to.end(), std::int64_t{0});
  const kernels::DispatchSend send{
      s.windows(index), arrays(data),        s.mode,         static_cast<const std::byte*>(x.data),
      x.pitch(),        options.row_scalars, s.streams(rows)};
  const kernels::Moved moved = s.split(data.tokens, [&](auto begin, auto end) {
    return s.kernels->dispatch_send(send, begin, end);
  });
  const auto row_bytes = static_cast<std::int64_t>(s.window.layout().row_bytes);
  s.traffic.dispatch_rows += moved.rows;
  s.traffic.dispatch_bytes += moved.rows * row_bytes;
  s.traffic.dispatch_link_bytes += moved.link_rows * row_bytes;

  for (std::size_t peer = 0; peer < rows_to.size(); ++peer) {
    s.signal_counts[peer] = static_cast<std::uint32_t>(rows_to[peer]);
  }
  ++g.dispatch_epoch;
  s.window.signal_all({Channel::dispatch, index, g.dispatch_epoch}, s.signal_counts);

  g.phase = Phase::sending;
  g.plan_serial = plan.serial_;
  g.slot_counts = data.slot_counts;
  g.slot_begin = data.slot_begin;
  g.payload_rows_from = s.mode.sends_token_rows() ? data.token_rows_from : data.rows_from;
  g.token_rows = data.token_rows_received;
  g.has_scalars = options.row_scalars != nullptr;
  g.out = options.out;
  DispatchHandle handle;
  handle.state_ = &s;
  handle.step_ = g.step;
  return handle;
}

Received Exchange::DispatchHandle::finish() {
  WHERRY_CHECK(state_ != nullptr, ErrorCode::misuse, State::where(Stage::dispatch_recv, -1),
               "finish() was called twice, or on a handle that no dispatch_begin() returned");
  State& s = *std::exchange(state_, nullptr);
  Generation& g = s.at_step(step_);
  const std::uint64_t index = s.generation_of(step_);
  s.window.wait_all({Channel::dispatch, index, g.dispatch_epoch}, {Stage::dispatch_recv, step_},
                    s.signal_counts);
  for (int peer = 0; peer < s.size; ++peer) {
    const auto at = static_cast<std::size_t>(peer);
    WHERRY_CHECK(s.signal_counts[at] == g.payload_rows_from[at], ErrorCode::misuse,
                 (Error::Where{Stage::dispatch_recv, s.rank, peer}),
                 "step {}: rank {} sent {} rows, the plan says {}; do all ranks dispatch with the "
                 "same plan?",
                 step_, peer, s.signal_counts[at], g.payload_rows_from[at]);
  }
  if (s.config.layout == Layout::tokens) {
    g.choices.resize(static_cast<std::size_t>(g.token_rows * s.config.topk));
    g.gather.resize(static_cast<std::size_t>(g.slot_begin.back()));
  }
  s.kernels->dispatch_recv({s.windows(index), s.mode, g.slot_counts, g.slot_begin, g.token_rows,
                            s.config.topk, g.choices.data(), g.gather.data()});
  g.phase = Phase::received;
  Received received = s.received_view(g);
  if (g.out.data != nullptr) {
    const TensorView in_window = received.rows;
    g.out.rows = in_window.rows;
    s.team.split(in_window.rows, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t row = begin; row < end; ++row) {
        std::memcpy(g.out.row(row), in_window.row(row), s.window.layout().row_bytes);
      }
    });
    received.rows = g.out;
  }
  return received;
}

Received Exchange::dispatch(const Plan& plan, ConstTensorView x, const DispatchOptions& options) {
  return dispatch_begin(plan, x, options).finish();
}

Received Exchange::State::received_view(const Generation& g) const {
  const layout::WindowLayout& l = window.layout();
  const std::uint64_t index = generation_of(g.step);
  Received r;
  r.rows.data = window.own() + l.row(index, 0);
  r.rows.dtype = config.dtype;
  r.rows.rows = payload_rows(g);
  r.rows.cols = config.hidden;
  r.rows.pitch_bytes = static_cast<std::int64_t>(l.row_pitch);
  r.slot_counts = g.slot_counts;
  r.slot_begin = g.slot_begin;
  if (g.has_scalars) {
    r.row_scalars = {reinterpret_cast<const float*>(window.own() + l.scalar(index, 0)),
                     static_cast<std::size_t>(g.slot_begin.back())};
  }
  r.choices = g.choices;
  r.gather = g.gather;
  r.step = g.step;
  return r;
}

void Exchange::release(const Received& received) {
  State& s = *state_;
  s.check();
  WHERRY_CHECK(received.step >= 1 && received.step <= s.steps, ErrorCode::misuse,
               State::where(Stage::release, s.rank), "step {} is not a dispatch of this exchange",
               received.step);
  Generation& g = s.at_step(received.step);
  WHERRY_CHECK(g.step == received.step && g.phase == Phase::received, ErrorCode::misuse,
               State::where(Stage::release, s.rank),
               "the rows of step {} are not held: it was combined, released or overwritten already",
               received.step);
  s.send_credits(g);
  g.phase = Phase::released;
}

}  // namespace wherry
