// Stage 3: dispatch and its halves.
#include <cstring>
#include <numeric>
#include <utility>
#include <vector>

#include "exchange/device.hpp"
#include "exchange/state.hpp"
#include "kernels/wires.hpp"
#include "support/check.hpp"

namespace wherry {

using layout::Channel;

Exchange::DispatchHandle Exchange::dispatch_begin(const Plan& plan, ConstTensorView x,
                                                  const DispatchOptions& options) {
  if (device_) {
    DispatchHandle handle;
    handle.step_ = device_->dispatch_begin(on_device(plan, Stage::dispatch_send), x, options);
    handle.device_ = device_.get();
    return handle;
  }
  State& s = *state_;
  s.check();
  s.check_plan(plan, Stage::dispatch_send);
  WHERRY_CHECK(plan.placement_ == s.placements, ErrorCode::misuse,
               State::where(Stage::dispatch_send, s.rank),
               "the plan was filled before set_placement(); fill it again");
  // x in the wire's format is told by its shape, or, where dtypes are the same, needs no telling.
  const bool converted =
      options.x_scales != nullptr || (x.dtype != s.config.dtype && x.dtype == s.on_wire(0).dtype);
  s.check_tensor(Stage::dispatch_send, s.steps + 1, "x", x,
                 converted ? s.on_wire(plan.tokens()) : s.plain(plan.tokens()));
  if (converted && s.mode.dispatch_wire.quantised() && options.x_scales == nullptr &&
      plan.tokens() > 0) {
    s.refuse(Stage::dispatch_send, s.steps + 1,
             fmt::format("x is {} already, but x_scales is null", name(s.mode.dispatch_wire.wire)));
  }
  if (is_given(options.out)) s.check_out(options.out, plan.to_host());
  Generation& g = s.enter(Stage::dispatch_send, false);
  const std::uint64_t index = s.generation_of(g.step);
  const PlanData& data = plan.to_host();

  const auto& rows_to = s.mode.sends_token_rows() ? data.token_rows_to : data.rows_to;
  const std::int64_t rows = std::accumulate(rows_to.begin(), rows_to.end(), std::int64_t{0});
  const kernels::DispatchSend send{s.windows(index),
                                   arrays(data, 0, data.tokens),
                                   s.mode,
                                   static_cast<const std::byte*>(x.data),
                                   x.pitch(),
                                   converted,
                                   static_cast<const std::byte*>(options.x_scales),
                                   options.row_scalars,
                                   s.streams(rows)};
  // Tokens keep their numbers: the scales of rows that are converted already lie in one plane.
  const kernels::Moved moved = s.split(data.send_end - data.send_begin, [&](auto begin, auto end) {
    return s.kernels->dispatch_send(send, data.send_begin + begin, data.send_begin + end);
  });
  const std::int64_t row_bytes = s.mode.dispatch_wire.row_bytes();
  s.traffic.dispatch_rows += moved.rows;
  s.traffic.dispatch_bytes += moved.rows * row_bytes;
  s.traffic.dispatch_link_bytes += moved.link_rows * row_bytes;

  for (std::size_t peer = 0; peer < rows_to.size(); ++peer) {
    s.signal_counts[peer] = static_cast<std::uint32_t>(rows_to[peer]) |
                            (options.row_scalars != nullptr ? layout::kWithScalars : 0);
  }
  ++g.dispatch_epoch;
  s.window.signal_all({Channel::dispatch, index, g.dispatch_epoch}, s.signal_counts);

  g.phase = Phase::sending;
  g.plan_serial = plan.serial_;
  g.slot_counts = data.slot_counts;
  g.slot_begin = data.slot_begin;
  g.payload_rows_from = s.mode.sends_token_rows() ? data.token_rows_from : data.rows_from;
  g.token_rows = data.token_rows_received;
  g.out = options.out;
  DispatchHandle handle;
  handle.state_ = &s;
  handle.step_ = g.step;
  return handle;
}

Received Exchange::DispatchHandle::finish() {
  if (device_ != nullptr) return std::exchange(device_, nullptr)->dispatch_finish(step_);
  WHERRY_CHECK(state_ != nullptr, ErrorCode::misuse, State::where(Stage::dispatch_recv, -1),
               "finish() was called twice, or on a handle that no dispatch_begin() returned");
  State& s = *std::exchange(state_, nullptr);
  Generation& g = s.at_step(step_);
  const std::uint64_t index = s.generation_of(step_);
  s.window.wait_all({Channel::dispatch, index, g.dispatch_epoch}, {Stage::dispatch_recv, step_},
                    s.signal_counts);
  s.check_arrivals(g);
  if (s.config.layout == Layout::tokens) {
    g.choices.resize(static_cast<std::size_t>(g.token_rows * s.config.topk));
    g.gather.resize(static_cast<std::size_t>(g.slot_begin.back()));
  }
  s.kernels->dispatch_recv({s.windows(index), s.mode, g.slot_counts, g.slot_begin, g.token_rows,
                            s.config.topk, g.choices.data(), g.gather.data()});
  g.phase = Phase::received;
  Received received = s.received_view(g);
  if (is_given(g.out)) {
    g.out.rows = received.rows.rows;
    s.fill_out(g, received);
    received.rows = g.out;
    received.wire = wire_format(Wire::same, s.config.dtype, s.config.hidden);
    received.scales = nullptr;
    received.scale_rows = 0;
  }
  return received;
}

void Exchange::State::check_arrivals(Generation& g) {
  int with = -1;
  int without = -1;
  for (int peer = 0; peer < size; ++peer) {
    const auto at = static_cast<std::size_t>(peer);
    const std::uint32_t rows = signal_counts[at] & ~layout::kWithScalars;
    if (rows != g.payload_rows_from[at]) {
      end(ErrorCode::misuse, {Stage::dispatch_recv, rank, peer}, g.step,
          fmt::format("step {}: rank {} sent {} rows, the plan says {}; do all ranks dispatch with "
                      "the same plan?",
                      g.step, peer, rows, g.payload_rows_from[at]));
    }
    const bool scalars = (signal_counts[at] & layout::kWithScalars) != 0;
    if (scalars) with = peer;
    // A rank without tokens may have no memory to point at.
    if (!scalars && rows > 0) without = peer;
  }
  if (with >= 0 && without >= 0) {
    end(ErrorCode::misuse, {Stage::dispatch_recv, rank, without}, g.step,
        fmt::format("step {}: rank {} gave row_scalars, rank {} did not; give them on all ranks or "
                    "on none",
                    g.step, with, without));
  }
  g.has_scalars = with >= 0;
}

Received Exchange::dispatch(const Plan& plan, ConstTensorView x, const DispatchOptions& options) {
  if (device_) return device_->dispatch(on_device(plan, Stage::dispatch_send), x, options);
  return dispatch_begin(plan, x, options).finish();
}

Received Exchange::plan_dispatch(const Routing& routing, Plan& plan, ConstTensorView x,
                                 const DispatchOptions& options) {
  if (device_) {
    const Received received =
        device_->plan_dispatch(routing, on_device(plan, Stage::plan), x, options);
    fill_shape(routing, plan);
    return received;
  }
  this->plan(routing, plan);
  return dispatch(plan, x, options);
}

void Exchange::State::fill_out(const Generation& g, const Received& received) {
  const TensorView& out = g.out;
  const auto fill = [&](std::int64_t begin, std::int64_t end) {
    if (!mode.converts_rows()) {
      for (std::int64_t row = begin; row < end; ++row) {
        std::memcpy(out.row(row), received.rows.row(row), window.layout().row_bytes);
      }
      return;
    }
    std::vector<std::byte> scales(static_cast<std::size_t>(received.wire.scale_bytes));
    for (std::int64_t row = begin; row < end; ++row) {
      kernels::get_scales(received.wire, static_cast<const std::byte*>(received.scales),
                          received.scale_rows, row, scales.data());
      kernels->dequantize_row(received.wire, received.rows.row(row), scales.data(), out.row(row));
    }
  };
  // The spare room of slots is most of them; the padding of grouped is promised to be zero.
  if (config.layout == Layout::slots) {
    split_filled(g, fill);
  } else {
    team.split(out.rows, fill);
  }
}

Received Exchange::State::received_view(const Generation& g) const {
  const layout::WindowLayout& l = window.layout();
  const std::uint64_t index = generation_of(g.step);
  Received r;
  r.rows.data = window.own() + l.row(index, 0);
  const Shape shape = on_wire(payload_rows(g));
  r.rows.dtype = shape.dtype;
  r.rows.rows = shape.rows;
  r.rows.cols = shape.cols;
  r.rows.pitch_bytes = static_cast<std::int64_t>(l.row_pitch);
  r.wire = mode.dispatch_wire;
  if (r.wire.quantised()) {
    r.scales = window.own() + l.scale_plane(index);
    r.scale_rows = static_cast<std::int64_t>(l.row_capacity);
  }
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
  if (device_) return device_->release(received);
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
