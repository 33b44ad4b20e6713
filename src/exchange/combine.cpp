// Stage 5: combine and its halves.
#include <algorithm>
#include <cstring>
#include <utility>

#include "exchange/device.hpp"
#include "exchange/state.hpp"
#include "support/check.hpp"

namespace wherry {

using layout::Channel;

TensorView Exchange::combine_input(const Plan& plan) {
  if (device_) return device_->combine_input(on_device(plan, Stage::combine_send));
  State& s = *state_;
  s.check();
  s.check_plan(plan, Stage::combine_send);
  const Generation* g = s.oldest_uncombined(plan.serial_);
  WHERRY_CHECK(g != nullptr, ErrorCode::misuse, State::where(Stage::combine_send, s.rank),
               "no finished dispatch of this plan waits for its combine");
  WHERRY_CHECK(s.mode.keeps_results(), ErrorCode::unsupported,
               State::where(Stage::combine_send, s.rank),
               "combine_wire is {}, so results are converted on their way into the window and "
               "cannot be written there as they are: pass memory of your own to combine",
               name(s.mode.combine_wire.wire));
  TensorView view;
  view.data = s.window.own() + s.window.layout().result(s.generation_of(g->step), 0);
  view.dtype = s.config.dtype;
  view.rows = s.payload_rows(*g);
  view.cols = s.config.hidden;
  view.pitch_bytes = static_cast<std::int64_t>(s.window.layout().result_pitch);
  return view;
}

void Exchange::State::place_results(const Generation& g, const ConstTensorView& y) {
  const layout::WindowLayout& l = window.layout();
  const std::uint64_t index = generation_of(g.step);
  if (y.data == window.own() + l.result(index, 0)) return;  // combine_input(): it is there already
  const auto copy = [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      const auto at = static_cast<std::uint64_t>(row);
      std::byte* const result = window.own() + l.result(index, at);
      if (mode.keeps_results()) {
        std::memcpy(result, y.row(row), l.result_bytes);
      } else {
        kernels->quantize_row(mode.combine_wire, y.row<std::byte>(row), result,
                              window.own() + l.home_scale(index, at));
      }
    }
  };
  split_filled(g, copy);
}

Exchange::CombineHandle Exchange::combine_begin(const Plan& plan, ConstTensorView y, TensorView out,
                                                const CombineOptions& options) {
  if (device_) {
    CombineHandle handle;
    handle.step_ = device_->combine_begin(on_device(plan, Stage::combine_send), y, out, options);
    handle.device_ = device_.get();
    return handle;
  }
  State& s = *state_;
  s.check();
  s.check_plan(plan, Stage::combine_send);
  WHERRY_CHECK(s.config.dtype != DType::raw, ErrorCode::unsupported,
               State::where(Stage::combine_send, s.rank),
               "rows of dtype raw are opaque bytes and cannot be summed");
  Generation* g = s.oldest_uncombined(plan.serial_);
  WHERRY_CHECK(g != nullptr, ErrorCode::misuse, State::where(Stage::combine_send, s.rank),
               "no finished dispatch of this plan waits for its combine");
  s.check_tensor(Stage::combine_send, g->step, "y", y, s.plain(s.payload_rows(*g)));
  s.check_tensor(Stage::combine_send, g->step, "out", out, s.plain(plan.home_tokens()));
  if (is_given(options.addend)) {
    s.check_tensor(Stage::combine_send, g->step, "addend", options.addend,
                   s.plain(plan.home_tokens()));
  }
  const std::uint64_t index = s.generation_of(g->step);
  const layout::WindowLayout& l = s.window.layout();
  s.place_results(*g, y);
  if (options.row_scalars != nullptr) {
    std::memcpy(s.window.own() + l.result_scalar(index, 0), options.row_scalars,
                static_cast<std::size_t>(g->slot_begin.back()) * sizeof(float));
  }
  if (s.mode.sums_partials()) {
    const kernels::CombineSend send{s.windows(index), s.mode, s.config.topk,
                                    s.streams(g->token_rows)};
    s.team.split(g->token_rows,
                 [&](auto begin, auto end) { s.kernels->combine_send(send, begin, end); });
  }
  std::fill(s.signal_counts.begin(), s.signal_counts.end(),
            static_cast<std::uint32_t>(s.payload_rows(*g)) |
                (options.row_scalars != nullptr ? layout::kWithScalars : 0));
  ++g->combine_epoch;
  s.window.signal_all({Channel::combine, index, g->combine_epoch}, s.signal_counts);

  const PlanData& data = plan.to_host();
  g->phase = Phase::combining;
  g->pending = {s.windows(index),
                arrays(data, data.home_begin, data.home_end),
                s.mode,
                static_cast<std::byte*>(out.data),
                out.pitch(),
                static_cast<const std::byte*>(options.addend.data),
                options.addend.pitch(),
                options.scalars_out,
                s.streams(plan.home_tokens())};
  CombineHandle handle;
  handle.state_ = &s;
  handle.step_ = g->step;
  return handle;
}

void Exchange::CombineHandle::finish() {
  if (device_ != nullptr) return std::exchange(device_, nullptr)->combine_finish(step_);
  WHERRY_CHECK(state_ != nullptr, ErrorCode::misuse, State::where(Stage::combine_recv, -1),
               "finish() was called twice, or on a handle that no combine_begin() returned");
  State& s = *std::exchange(state_, nullptr);
  Generation& g = s.at_step(step_);
  s.window.wait_all({Channel::combine, s.generation_of(step_), g.combine_epoch},
                    {Stage::combine_recv, step_}, s.signal_counts);
  const kernels::CombineRecv recv = g.pending;
  if (recv.scalars_out != nullptr) s.check_scalars_home(g);
  const kernels::Moved moved = s.split(recv.plan.tokens, [&](auto begin, auto end) {
    return s.kernels->combine_recv(recv, begin, end);
  });
  const std::int64_t result_bytes = s.mode.combine_wire.row_bytes();
  s.traffic.combine_rows += moved.rows;
  s.traffic.combine_bytes += moved.rows * result_bytes;
  s.traffic.combine_link_bytes += moved.link_rows * result_bytes;
  g.phase = Phase::combined;
}

void Exchange::State::check_scalars_home(const Generation& g) {
  const kernels::PlanArrays& plan = g.pending.plan;
  for (std::int64_t at = 0; at < plan.tokens * plan.topk; ++at) {
    const std::int32_t peer = plan.dest[at];
    if (plan.row[at] < 0 ||
        (signal_counts[static_cast<std::size_t>(peer)] & layout::kWithScalars) != 0) {
      continue;
    }
    end(ErrorCode::misuse, {Stage::combine_recv, rank, peer}, g.step,
        fmt::format(
            "step {}: rank {} wants scalars_out, but rank {} gave no row_scalars; give them "
            "on all ranks or on none",
            g.step, rank, peer));
  }
}

void Exchange::combine(const Plan& plan, ConstTensorView y, TensorView out,
                       const CombineOptions& options) {
  if (device_) return device_->combine(on_device(plan, Stage::combine_send), y, out, options);
  combine_begin(plan, y, out, options).finish();
}

}  // namespace wherry
