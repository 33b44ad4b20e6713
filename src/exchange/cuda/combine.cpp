// Stage 5 on a GPU: combine and its halves.
#include <algorithm>

#include "exchange/cuda/exchange.hpp"
#include "kernels/cuda/launch.hpp"
#include "support/check.hpp"

namespace wherry::cuda {

namespace kernel = kernels::cuda;

namespace {

kernel::Sum sum_of(const kernels::Mode& mode) {
  if (mode.reduction == Reduction::by_token) return kernel::Sum::choices;
  if (mode.sends_token_rows()) return kernel::Sum::token_rows;
  return mode.sums_partials() ? kernel::Sum::partials : kernel::Sum::ranked;
}

}  // namespace

TensorView CudaExchange::combine_input(DevicePlan& device_plan) {
  throw_if_failed();
  const CudaPlan& plan = filled_plan(device_plan, Stage::combine_send);
  const Generation* g = oldest_uncombined(plan.serial());
  WHERRY_CHECK(g != nullptr, ErrorCode::misuse, at(Stage::combine_send),
               "no finished dispatch of this plan waits for its combine");
  WHERRY_CHECK(mode_.keeps_results(), ErrorCode::unsupported, at(Stage::combine_send),
               "combine_wire is {}, so results are converted on their way into the window and "
               "cannot be written there as they are: pass memory of your own to combine",
               name(mode_.combine_wire.wire));
  TensorView view = wanted(config().dtype, room(), config().hidden);
  view.data = context_.own + context_.layout.result(generation_of(g->step), 0);
  view.pitch_bytes = static_cast<std::int64_t>(context_.layout.result_pitch);
  return view;
}

CudaExchange::Generation& CudaExchange::begin_combine(DevicePlan& device_plan,
                                                      const ConstTensorView& y,
                                                      const TensorView& out,
                                                      const CombineOptions& options) {
  constexpr Stage kStage = Stage::combine_send;
  throw_if_failed();
  const CudaPlan& plan = filled_plan(device_plan, kStage);
  WHERRY_CHECK(config().dtype != DType::raw, ErrorCode::unsupported, at(kStage),
               "rows of dtype raw are opaque bytes and cannot be summed");
  check_device_memory(kStage, "row_scalars", options.row_scalars);
  check_device_memory(kStage, "scalars_out", options.scalars_out);
  Generation* const g = oldest_uncombined(plan.serial());
  WHERRY_CHECK(g != nullptr, ErrorCode::misuse, at(kStage),
               "no finished dispatch of this plan waits for its combine");
  const std::int64_t hidden = config().hidden;
  check_tensor(kStage, g->step, "y", y, wanted(config().dtype, y.rows, hidden));
  if (y.rows > room()) {
    refuse(kStage, g->step, fmt::format("y has {} rows; there is room for {}", y.rows, room()));
  }
  check_tensor(kStage, g->step, "out", out, wanted(config().dtype, plan.tokens(), hidden));
  if (options.addend.data != nullptr) {
    check_tensor(kStage, g->step, "addend", options.addend,
                 wanted(config().dtype, plan.tokens(), hidden));
  }
  g->sums = out;
  g->addend = options.addend;
  g->scalars_out = options.scalars_out;
  if (options.row_scalars != nullptr) {
    cuda::check(kernel::launch_place_scalars(scalars_of(*g, options.row_scalars, nullptr), num_sms_,
                                             stream_),
                at(kStage), "launch");
  }
  if (y.rows > 0) place_results(*g, y);
  return *g;
}

void CudaExchange::place_results(const Generation& g, const ConstTensorView& y) {
  const layout::WindowLayout& l = context_.layout;
  const auto where = at(Stage::combine_send);
  const std::uint32_t index = generation_of(g.step);
  std::byte* const results = context_.own + l.result(index, 0);
  if (y.data == results) return;  // combine_input(): it is there already
  const kernel::Rows rows =
      mode_.sends_token_rows() ? kernel::Rows::per_rank : kernel::Rows::per_slot;
  if (!mode_.keeps_results()) {
    kernel::ConvertRowsArgs convert{};
    convert.plan = g.plan;
    convert.format = mode_.combine_wire;
    convert.from = static_cast<const std::byte*>(y.data);
    convert.from_pitch = static_cast<std::uint64_t>(y.pitch());
    convert.to = results;
    convert.to_pitch = l.result_pitch;
    convert.scales = context_.own + l.home_scale(index, 0);  // one after the other: a plane
    convert.scale_rows = static_cast<std::int64_t>(l.home_capacity);
    convert.rows = rows;
    convert.local_slots = placement_.num_local_slots(rank());
    cuda::check(kernel::launch_convert_rows(convert, num_sms_, stream_), where, "launch");
    return;
  }
  kernel::CopyRowsArgs copy{};
  copy.plan = g.plan;
  copy.from = static_cast<const std::byte*>(y.data);
  copy.from_pitch = static_cast<std::uint64_t>(y.pitch());
  copy.to = results;
  copy.to_pitch = l.result_pitch;
  copy.row_bytes = l.result_bytes;
  copy.rows = rows;
  copy.local_slots = placement_.num_local_slots(rank());
  cuda::check(kernel::launch_copy_rows(copy, num_sms_, stream_), where, "launch");
}

void CudaExchange::send_results(const Generation& g) {
  if (pushes_partials()) return run_partials(recv_args(g, true, false), Stage::combine_send);
  kernel::CombineSendArgs args{};
  args.context = context_;
  args.plan = g.plan;
  args.generation = generation_of(g.step);
  args.dtype = config().dtype;
  args.partials = mode_.sums_partials();
  args.overlaps = overlaps_;
  launches_->launch(local_, args, stream_, at(Stage::combine_send),
                    [this](auto& table, int ranks, cudaStream_t stream) {
                      return sums_converted()
                                 ? kernel::launch_combine_send_converted(
                                       table, ranks, table.rank[0].partials ? num_sms_ : 1,
                                       mode_.combine_wire, stream)
                                 : kernel::launch_combine_send(table, ranks, stream);
                    });
}

kernel::CombineRecvArgs CudaExchange::recv_args(const Generation& g, bool send,
                                                bool receive) const {
  kernel::CombineRecvArgs args{};
  args.context = context_;
  args.plan = g.plan;
  args.out = static_cast<std::byte*>(g.sums.data);
  args.out_pitch = static_cast<std::uint64_t>(g.sums.pitch());
  args.generation = generation_of(g.step);
  args.dtype = config().dtype;
  args.sum = sum_of(mode_);
  args.send = send;
  args.receive = receive;
  args.unweighted = config().weights == Weights::caller;
  args.overlaps = overlaps_;
  args.addend = static_cast<const std::byte*>(g.addend.data);
  args.addend_pitch = static_cast<std::uint64_t>(g.addend.pitch());
  return args;
}

void CudaExchange::run_partials(const kernel::CombineRecvArgs& args, Stage stage) {
  launches_->launch(local_, args, stream_, at(stage),
                    [this](auto& table, int ranks, cudaStream_t stream) {
                      return kernel::launch_combine_partials(table, ranks, num_sms_, stream);
                    });
}

void CudaExchange::pull_results(const kernel::CombineRecvArgs& args) {
  launches_->launch(
      local_, args, stream_, at(Stage::combine_recv),
      [this](auto& table, int ranks, cudaStream_t stream) {
        if (sums_converted()) {
          std::int64_t tokens = 0;
          for (int rank = 0; rank < ranks; ++rank) {
            tokens = std::max<std::int64_t>(tokens, table.rank[rank].plan.tokens);
          }
          return kernel::launch_combine_recv_converted(
              table, ranks, kernel::choose_conversion_shape({tokens, config().hidden, num_sms_}),
              mode_.combine_wire, stream);
        }
        kernel::CombineJob job;
        job.row_bytes = context_.layout.result_bytes;
        job.copies = everywhere_;
        job.num_sms = num_sms_;
        job.sum = table.rank[0].sum;
        job.bulk = bulk_ && over_link_;
        job.most_terms = static_cast<std::uint64_t>(std::min(config().topk, size()));
        return kernel::launch_combine_recv(table, ranks, kernel::choose_combine_shape(job), stream);
      });
}

void CudaExchange::sum_results(Generation& g, bool send) {
  const kernel::CombineRecvArgs args = recv_args(g, send, true);
  if (pushes_partials()) {
    run_partials(args, Stage::combine_recv);
  } else {
    pull_results(args);
  }
  g.phase = Phase::combined;
  if (g.scalars_out == nullptr) return;
  cuda::check(
      kernel::launch_fetch_scalars(scalars_of(g, nullptr, g.scalars_out), num_sms_, stream_),
      at(Stage::combine_recv), "launch");
}

std::uint64_t CudaExchange::combine_begin(DevicePlan& plan, const ConstTensorView& y,
                                          const TensorView& out, const CombineOptions& options) {
  const DeviceGuard guard(device_.ordinal);
  Generation& g = begin_combine(plan, y, out, options);
  send_results(g);
  g.phase = Phase::combining;
  return g.step;
}

void CudaExchange::combine_finish(std::uint64_t step) {
  const DeviceGuard guard(device_.ordinal);
  throw_if_failed();
  sum_results(at_step(step), false);
}

void CudaExchange::combine(DevicePlan& plan, const ConstTensorView& y, const TensorView& out,
                           const CombineOptions& options) {
  const DeviceGuard guard(device_.ordinal);
  Generation& g = begin_combine(plan, y, out, options);
  const bool separate = mode_.sums_partials() && !pushes_partials();
  if (separate) send_results(g);
  sum_results(g, !separate);
}

}  // namespace wherry::cuda
