// Stage 3 on a GPU: dispatch and its halves, and plan and dispatch in one launch.
#include <algorithm>

#include "exchange/cuda/exchange.hpp"
#include "kernels/cuda/launch.hpp"
#include "support/check.hpp"

namespace wherry::cuda {

namespace kernel = kernels::cuda;

namespace {

bool on_units(const void* pointer, std::uint64_t pitch) {
  return (reinterpret_cast<std::uintptr_t>(pointer) | pitch) % layout::kRowAlignment == 0;
}

}  // namespace

void CudaExchange::check_dispatch(const CudaPlan* plan, std::int64_t tokens,
                                  const ConstTensorView& x, const DispatchOptions& options) {
  constexpr Stage kStage = Stage::dispatch_send;
  WHERRY_CHECK(plan == nullptr || plan->placement() == placements_, ErrorCode::misuse, at(kStage),
               "the plan was filled before set_placement(); fill it again");
  WHERRY_CHECK(options.x_scales == nullptr, ErrorCode::unsupported, at(kStage),
               "x_scales is not there on CUDA yet");
  check_device_memory(kStage, "row_scalars", options.row_scalars);
  WHERRY_CHECK(options.out.data == nullptr || !mode_.converts_rows(), ErrorCode::unsupported,
               at(kStage), "out cannot be given on CUDA where rows travel in another format");
  check_tensor(kStage, steps_ + 1, "x", x, wanted(config().dtype, tokens, config().hidden));
  if (mode_.converts_rows() && tokens > 0 &&
      !on_units(x.data, static_cast<std::uint64_t>(x.pitch()))) {
    refuse(kStage, steps_ + 1, "x is not aligned to 16 bytes, address and pitch");
  }
  const TensorView& out = options.out;
  if (out.data == nullptr) return;
  check_tensor(kStage, steps_ + 1, "out", out, wanted(config().dtype, out.rows, config().hidden));
}

CudaExchange::Generation& CudaExchange::begin_dispatch(const CudaPlan& plan,
                                                       const DispatchOptions& options) {
  Generation& g = enter();
  g.plan_serial = plan.serial();
  g.plan = plan.arrays();
  g.out = options.out;
  if (options.row_scalars != nullptr) {
    cuda::check(
        kernel::launch_send_scalars(scalars_of(g, options.row_scalars, nullptr), num_sms_, stream_),
        at(Stage::dispatch_send), "launch");
  }
  return g;
}

kernel::ScalarsArgs CudaExchange::scalars_of(const Generation& g, const float* from,
                                             float* to) const {
  return {context_, g.plan, from, to, generation_of(g.step), placement_.num_local_slots(rank())};
}

kernel::Outgoing CudaExchange::outgoing(const Generation& g, const ConstTensorView& x,
                                        bool receive) const {
  kernel::Outgoing send{};
  send.x = static_cast<const std::byte*>(x.data);
  send.x_pitch = static_cast<std::uint64_t>(x.pitch());
  send.scale_pitch = static_cast<std::uint64_t>(mode_.dispatch_wire.scale_pitch());
  send.generation = generation_of(g.step);
  send.rows = mode_.sends_token_rows() ? kernel::Rows::per_rank
              : fills_on_arrival()     ? kernel::Rows::first_slot
                                       : kernel::Rows::per_slot;
  send.entries = mode_.sends_entries();
  send.unweighted = config().weights == Weights::caller;
  send.receive = receive;
  send.overlaps = overlaps_;
  return send;
}

kernel::Lists CudaExchange::lists_of(const Generation& g) const {
  return {g.choices, g.gather,
          config().layout == Layout::slots ? 0 : placement_.num_local_slots(rank())};
}

void CudaExchange::send_rows(const Generation& g, const ConstTensorView& x, bool receive) {
  const kernel::DispatchSendArgs args{context_, g.plan, outgoing(g, x, receive),
                                      receive && expects_recv() ? lists_of(g) : kernel::Lists{}};
  launches_->launch(
      local_, args, stream_, at(Stage::dispatch_send),
      [this](auto& table, int ranks, cudaStream_t stream) {
        if (mode_.converts_rows()) {
          return kernel::launch_dispatch_send_e4m3(table, ranks, num_sms_, config().hidden, stream);
        }
        kernel::DispatchJob job;
        job.row_bytes = context_.layout.row_bytes;
        job.num_sms = num_sms_;
        job.bulk = bulk_;
        job.link = over_link_;
        job.copies = table.rank[0].send.rows == kernel::Rows::per_slot
                         ? static_cast<double>(config().topk)
                         : everywhere_;
        for (int rank = 0; rank < ranks; ++rank) {
          const kernel::DispatchSendArgs& each = table.rank[rank];
          job.tokens = std::max<std::int64_t>(job.tokens, each.plan.tokens);
          job.bulk = job.bulk && kernel::bulk_legal(job.row_bytes, each.send.x_pitch, each.send.x);
        }
        return kernel::launch_dispatch_send(table, ranks, kernel::choose_dispatch_shape(job),
                                            stream);
      });
}

bool CudaExchange::fills_on_arrival() const noexcept {
  // The first row of a token must have a place.
  return !one_gpu_ && config().layout == Layout::grouped && mode_.sends_entries() &&
         !mode_.converts_rows() && config().overflow == Overflow::error;
}

bool CudaExchange::expects_recv() const noexcept {
  return mode_.sends_token_rows() ||
         (config().layout == Layout::grouped && (config().alignment > 1 || fills_on_arrival()));
}

bool CudaExchange::lists_with_rows(const ConstTensorView& x) const noexcept {
  // A launch less: 4 us of 188 over a link. On one GPU, 8 ranks x 16 SMs, 850 us instead of 828.
  return over_link_ && bulk_ && mode_.sends_token_rows() && !mode_.converts_rows() &&
         kernel::bulk_legal(context_.layout.row_bytes, static_cast<std::uint64_t>(x.pitch()),
                            x.data);
}

void CudaExchange::receive_rows(const Generation& g) {
  kernel::DispatchRecvArgs args{};
  args.context = context_;
  args.plan = g.plan;
  args.generation = generation_of(g.step);
  args.rows = outgoing(g, {}, false).rows;
  args.scale_pitch = static_cast<std::uint64_t>(mode_.dispatch_wire.scale_pitch());
  args.lists = lists_of(g);
  const int blocks = expects_recv() ? num_sms_ : 1;
  launches_->launch(local_, args, stream_, at(Stage::dispatch_recv),
                    [blocks](auto& table, int ranks, cudaStream_t stream) {
                      return kernel::launch_dispatch_recv(table, ranks, blocks, stream);
                    });
}

Received CudaExchange::end_dispatch(Generation& g) {
  g.phase = Phase::received;
  const layout::WindowLayout& l = context_.layout;
  const std::uint32_t index = generation_of(g.step);
  Received r;
  r.wire = mode_.dispatch_wire;
  r.rows.data = context_.own + l.row(index, 0);
  r.rows.dtype = r.wire.quantised() ? DType::raw : config().dtype;
  r.rows.rows = room();
  r.rows.cols = r.wire.quantised() ? r.wire.payload_bytes : config().hidden;
  r.rows.pitch_bytes = static_cast<std::int64_t>(l.row_pitch);
  if (r.wire.quantised()) {
    r.scales = context_.own + l.scale_plane(index);
    r.scale_rows = static_cast<std::int64_t>(l.row_capacity);
  }
  r.step = g.step;
  r.device.slot_counts = g.plan.slot_counts;
  r.device.slot_begin = g.plan.slot_begin;
  r.device.num_rows = g.plan.totals;
  static_assert(sizeof(kernel::TokenChoice) == sizeof(Received::TokenChoice));
  r.device.choices = reinterpret_cast<const Received::TokenChoice*>(g.choices);
  r.device.gather = g.gather;
  r.device.row_scalars = reinterpret_cast<const float*>(context_.own + l.scalar(index, 0));
  if (g.out.data == nullptr) return r;

  kernel::CopyRowsArgs copy{};
  copy.plan = g.plan;
  copy.from = static_cast<const std::byte*>(r.rows.data);
  copy.from_pitch = l.row_pitch;
  copy.to = static_cast<std::byte*>(g.out.data);
  copy.to_pitch = static_cast<std::uint64_t>(g.out.pitch());
  copy.row_bytes = l.row_bytes;
  copy.rows = mode_.sends_token_rows() ? kernel::Rows::per_rank : kernel::Rows::per_slot;
  copy.local_slots = placement_.num_local_slots(rank());
  copy.padding = config().layout == Layout::grouped;
  cuda::check(kernel::launch_copy_rows(copy, num_sms_, stream_), at(Stage::dispatch_recv),
              "launch");
  r.rows = g.out;
  return r;
}

std::uint64_t CudaExchange::dispatch_begin(DevicePlan& device_plan, const ConstTensorView& x,
                                           const DispatchOptions& options) {
  const DeviceGuard guard(device_.ordinal);
  throw_if_failed();
  const CudaPlan& plan = filled_plan(device_plan, Stage::dispatch_send);
  check_dispatch(&plan, plan.tokens(), x, options);
  Generation& g = begin_dispatch(plan, options);
  send_rows(g, x, false);
  g.phase = Phase::sending;
  return g.step;
}

Received CudaExchange::dispatch_finish(std::uint64_t step) {
  const DeviceGuard guard(device_.ordinal);
  throw_if_failed();
  Generation& g = at_step(step);
  receive_rows(g);
  return end_dispatch(g);
}

Received CudaExchange::dispatch(DevicePlan& device_plan, const ConstTensorView& x,
                                const DispatchOptions& options) {
  const DeviceGuard guard(device_.ordinal);
  throw_if_failed();
  const CudaPlan& plan = filled_plan(device_plan, Stage::dispatch_send);
  check_dispatch(&plan, plan.tokens(), x, options);
  Generation& g = begin_dispatch(plan, options);
  const bool apart = expects_recv() && !lists_with_rows(x);
  send_rows(g, x, !apart);
  if (apart) receive_rows(g);
  return end_dispatch(g);
}

namespace {

kernel::PlanDispatchJob fused_job(const ExchangeConfig& config, const kernels::Mode& mode,
                                  const kernel::PlacementArrays& placement, int ranks, int num_sms,
                                  std::int64_t tokens) {
  kernel::PlanDispatchJob job;
  job.tokens = static_cast<int>(tokens);
  job.num_sms = num_sms;
  job.topk = config.topk;
  job.ranks = ranks;
  job.experts = placement.experts;
  job.slots = placement.slots;
  job.row_bytes = static_cast<std::uint64_t>(mode.dispatch_wire.payload_bytes);
  job.scale_pitch = static_cast<std::uint64_t>(mode.dispatch_wire.scale_pitch());
  return job;
}

}  // namespace

bool CudaExchange::fuses(const ConstTensorView& x) const noexcept {
  if (!on_units(x.data, static_cast<std::uint64_t>(x.pitch()))) return false;
  kernel::PlanDispatchJob job =
      fused_job(config(), mode_, placement_arrays_, size(), num_sms_, config().max_tokens);
  job.bulk = bulk_;
  job.shared_bytes = shared_bytes_;
  return kernel::choose_plan_dispatch_shape(job).chunk_tokens != 0;
}

Received CudaExchange::plan_dispatch(const Routing& routing, DevicePlan& device_plan,
                                     const ConstTensorView& x, const DispatchOptions& options) {
  // Scalars go to the places that the plan gives them, before the rows are signalled.
  if (options.row_scalars != nullptr || !fuses(x)) {
    plan(routing, device_plan);
    return dispatch(device_plan, x, options);
  }
  const DeviceGuard guard(device_.ordinal);
  throw_if_failed();
  CudaPlan& plan = own_plan(device_plan, Stage::plan);
  kernel::PlanDispatchArgs args{};
  args.count = count_args(routing, plan);
  check_device_memory(Stage::plan, "ids", args.count.plan.tokens > 0 ? routing.ids : nullptr);
  check_device_memory(Stage::plan, "weights",
                      args.count.plan.tokens > 0 ? routing.weights : nullptr);
  check_dispatch(nullptr, args.count.call_status == 0 ? routing.tokens : x.rows, x, options);
  Generation& g = begin_dispatch(plan, options);
  g.plan = args.count.plan;
  args.send = outgoing(g, x, !expects_recv());
  launches_->launch(
      local_, args, stream_, at(Stage::plan), [this](auto& table, int ranks, cudaStream_t stream) {
        std::int64_t tokens = 0;
        for (int rank = 0; rank < ranks; ++rank) {
          tokens = std::max<std::int64_t>(tokens, table.rank[rank].count.plan.tokens);
        }
        kernel::PlanDispatchJob job =
            fused_job(config(), mode_, placement_arrays_, size(), num_sms_, tokens);
        job.bulk = bulk_;
        job.shared_bytes = shared_bytes_;
        const kernel::PlanDispatchShape shape = kernel::choose_plan_dispatch_shape(job);
        for (int rank = 0; rank < ranks; ++rank) {
          table.rank[rank].count.chunk_tokens = shape.chunk_tokens;
        }
        return kernel::launch_plan_dispatch(table, ranks, shape, stream);
      });
  plan.filled(args.count.plan.tokens, ++plans_, placements_, stream_);
  g.plan_serial = plan.serial();
  if (expects_recv()) receive_rows(g);
  return end_dispatch(g);
}

}  // namespace wherry::cuda
