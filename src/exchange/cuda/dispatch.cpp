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
  check_device_memory(kStage, "row_scalars", options.row_scalars);
  if (is_converted(x, options)) {
    check_tensor(kStage, steps_ + 1, "x", x, on_wire(tokens));
    check_x_scales(tokens, options.x_scales);
  } else {
    check_tensor(kStage, steps_ + 1, "x", x, wanted(config().dtype, tokens, config().hidden));
  }
  const TensorView& out = options.out;
  if (out.data == nullptr) return;
  check_tensor(kStage, steps_ + 1, "out", out, wanted(config().dtype, out.rows, config().hidden));
}

bool CudaExchange::is_converted(const ConstTensorView& x,
                                const DispatchOptions& options) const noexcept {
  return options.x_scales != nullptr ||
         (x.dtype != config().dtype && x.dtype == on_wire(x.rows).dtype);
}

void CudaExchange::check_x_scales(std::int64_t tokens, const void* x_scales) {
  constexpr Stage kStage = Stage::dispatch_send;
  if (tokens == 0 || !mode_.dispatch_wire.quantised()) return;
  if (x_scales == nullptr) {
    refuse(kStage, steps_ + 1,
           fmt::format("x is {} already, but x_scales is null", name(mode_.dispatch_wire.wire)));
  }
  if (reinterpret_cast<std::uintptr_t>(x_scales) % sizeof(float) != 0) {
    refuse(kStage, steps_ + 1, "x_scales is not aligned to 4 bytes");
  }
  check_device_memory(kStage, "x_scales", x_scales);
}

CudaExchange::Generation& CudaExchange::begin_dispatch(const CudaPlan& plan,
                                                       const DispatchOptions& options) {
  Generation& g = enter();
  g.plan_serial = plan.serial();
  g.plan = plan.arrays();
  g.out = options.out;
  g.x_scales = static_cast<const std::byte*>(options.x_scales);
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
  send.x_scales = g.x_scales;
  send.converted = mode_.converts_rows() && (g.x_scales != nullptr || x.dtype != config().dtype);
  send.scale_pitch = static_cast<std::uint64_t>(mode_.dispatch_wire.scale_pitch());
  send.generation = generation_of(g.step);
  send.rows = mode_.sends_token_rows() ? kernel::Rows::per_rank
              : fills_on_arrival()     ? kernel::Rows::first_slot
                                       : kernel::Rows::per_slot;
  send.entries = mode_.sends_entries();
  send.unweighted = config().weights == Weights::caller;
  send.receive = receive;
  send.overlaps = overlaps_;
  // About as many come as are sent, and what experts make of them needs room too.
  const auto row_bytes =
      static_cast<std::uint64_t>(mode_.dispatch_wire.payload_bytes) + send.scale_pitch;
  send.rows_stay = 2 * row_bytes * static_cast<std::uint64_t>(g.plan.tokens) *
                       static_cast<std::uint64_t>(config().topk) <=
                   cache_bytes_;
  return send;
}

kernel::Lists CudaExchange::lists_of(const Generation& g) const {
  return {g.choices, g.gather,
          config().layout == Layout::slots ? 0 : placement_.num_local_slots(rank())};
}

void CudaExchange::send_rows(const Generation& g, const ConstTensorView& x, bool receive) {
  const kernel::DispatchSendArgs args{
      context_, g.plan, outgoing(g, x, receive),
      receive && mode_.sends_token_rows() ? lists_of(g) : kernel::Lists{}};
  launches_->launch(local_, args, stream_, at(Stage::dispatch_send),
                    [this](auto& table, int ranks, cudaStream_t stream) {
                      if (mode_.converts_rows()) return send_converted(table, ranks, stream);
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
                        job.bulk = job.bulk && kernel::bulk_legal(job.row_bytes, each.send.x_pitch,
                                                                  each.send.x);
                      }
                      return kernel::launch_dispatch_send(
                          table, ranks, kernel::choose_dispatch_shape(job), stream);
                    });
}

cudaError_t CudaExchange::send_converted(const kernel::RankTable<kernel::DispatchSendArgs>& table,
                                         int ranks, cudaStream_t stream) const {
  std::int64_t tokens = 0;
  bool fast = converts_fast();
  for (int rank = 0; rank < ranks; ++rank) {
    const kernel::DispatchSendArgs& each = table.rank[rank];
    tokens = std::max<std::int64_t>(tokens, each.plan.tokens);
    fast = fast && !each.send.converted && on_units(each.send.x, each.send.x_pitch);
  }
  if (fast) {
    kernel::DispatchJob job;
    job.tokens = tokens;
    job.row_bytes = static_cast<std::uint64_t>(mode_.dispatch_wire.payload_bytes);
    job.num_sms = num_sms_;
    job.bulk = bulk_;
    job.link = over_link_;
    return kernel::launch_dispatch_send_e4m3(table, ranks, kernel::choose_e4m3_shape(job),
                                             config().hidden, stream);
  }
  const kernel::ConversionJob job{tokens, config().hidden, num_sms_, mode_.dispatch_wire.wire};
  return kernel::launch_dispatch_send_converted(table, ranks, kernel::choose_conversion_shape(job),
                                                mode_.dispatch_wire, stream);
}

bool CudaExchange::converts_fast() const noexcept {
  return mode_.dispatch_wire.wire == Wire::e4m3_block128 && config().dtype == DType::bf16 &&
         config().scale_layout == ScaleLayout::row_major && config().hidden % 16 == 0;
}

bool CudaExchange::fills_on_arrival() const noexcept {
  // Records say which slots a token has; scales must lie row by row.
  return over_link_ && config().layout != Layout::tokens && mode_.sends_entries() &&
         (!mode_.converts_rows() || converts_fast());
}

bool CudaExchange::expects_recv() const noexcept {
  return mode_.sends_token_rows() || fills_on_arrival() ||
         (config().layout == Layout::grouped && config().alignment > 1);
}

bool CudaExchange::fills_with_rows() const noexcept {
  // A launch less, where a launch counts.
  return fills_on_arrival() && config().layout == Layout::slots;
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
  args.format = mode_.dispatch_wire;
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
  r.rows = on_wire(room());
  r.rows.data = context_.own + l.row(index, 0);
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
  r.device.topk = config().topk;
  r.device.choices = reinterpret_cast<const Received::TokenChoice*>(g.choices);
  r.device.gather = g.gather;
  r.device.row_scalars = reinterpret_cast<const float*>(context_.own + l.scalar(index, 0));
  if (g.out.data != nullptr) fill_out(g, r);
  return r;
}

void CudaExchange::fill_out(const Generation& g, Received& r) {
  const layout::WindowLayout& l = context_.layout;
  const auto where = at(Stage::dispatch_recv);
  if (mode_.converts_rows()) {
    kernel::ConvertRowsArgs convert{};
    convert.plan = g.plan;
    convert.format = mode_.dispatch_wire;
    convert.from = static_cast<const std::byte*>(r.rows.data);
    convert.from_pitch = l.row_pitch;
    convert.to = static_cast<std::byte*>(g.out.data);
    convert.to_pitch = static_cast<std::uint64_t>(g.out.pitch());
    convert.scales = context_.own + l.scale_plane(generation_of(g.step));
    convert.scale_rows = static_cast<std::int64_t>(l.row_capacity);
    convert.rows = mode_.sends_token_rows() ? kernel::Rows::per_rank : kernel::Rows::per_slot;
    convert.local_slots = placement_.num_local_slots(rank());
    convert.padding = config().layout == Layout::grouped;
    convert.back = true;
    cuda::check(kernel::launch_convert_rows(convert, num_sms_, stream_), where, "launch");
    r.wire = wire_format(Wire::same, config().dtype, config().hidden);
    r.scales = nullptr;
    r.scale_rows = 0;
    r.rows = g.out;
    return;
  }
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
  cuda::check(kernel::launch_copy_rows(copy, num_sms_, stream_), where, "launch");
  r.rows = g.out;
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
  const bool apart = expects_recv() && !lists_with_rows(x) && !fills_with_rows();
  send_rows(g, x, !apart);
  if (apart) receive_rows(g);
  return end_dispatch(g);
}

kernel::PlanDispatchShape CudaExchange::plan_dispatch_shape(std::int64_t tokens) const noexcept {
  kernel::PlanDispatchJob job;
  job.tokens = static_cast<int>(tokens);
  job.num_sms = num_sms_;
  job.topk = config().topk;
  job.ranks = size();
  job.experts = placement_arrays_.experts;
  job.slots = placement_arrays_.slots;
  job.row_bytes = static_cast<std::uint64_t>(mode_.dispatch_wire.payload_bytes);
  job.scale_pitch = static_cast<std::uint64_t>(mode_.dispatch_wire.scale_pitch());
  job.bulk = bulk_;
  job.shared_bytes = shared_bytes_;
  return kernel::choose_plan_dispatch_shape(job);
}

bool CudaExchange::fuses(const ConstTensorView& x) const noexcept {
  if (!on_units(x.data, static_cast<std::uint64_t>(x.pitch()))) return false;
  if (mode_.converts_rows() && (!converts_fast() || x.dtype != config().dtype)) return false;
  return plan_dispatch_shape(config().max_tokens).chunk_tokens != 0;
}

Received CudaExchange::plan_dispatch(const Routing& routing, DevicePlan& device_plan,
                                     const ConstTensorView& x, const DispatchOptions& options) {
  // Scalars go to the places that the plan gives them, before the rows are signalled.
  if (options.row_scalars != nullptr || options.x_scales != nullptr || !fuses(x)) {
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
  const bool apart = expects_recv() && !fills_with_rows();
  args.send = outgoing(g, x, !apart);
  // Not every link has atomic additions.
  args.adds_signals = args.send.receive && !over_link_ &&
                      static_cast<std::uint32_t>(num_sms_) <= layout::kMaxSignalParts;
  launches_->launch(
      local_, args, stream_, at(Stage::plan),
      [this](auto& table, int ranks, cudaStream_t stream) {
        std::int64_t tokens = 0;
        for (int rank = 0; rank < ranks; ++rank) {
          tokens = std::max<std::int64_t>(tokens, table.rank[rank].count.plan.tokens);
        }
        const kernel::PlanDispatchShape shape = plan_dispatch_shape(tokens);
        for (int rank = 0; rank < ranks; ++rank) {
          table.rank[rank].count.chunk_tokens = shape.chunk_tokens;
        }
        return kernel::launch_plan_dispatch(table, ranks, shape, stream);
      },
      plan.filled_event());
  plan.filled(args.count.plan.tokens, ++plans_, placements_);
  g.plan_serial = plan.serial();
  if (apart) receive_rows(g);
  return end_dispatch(g);
}

}  // namespace wherry::cuda
