// Stage 3, dispatch_recv: waits for every peer's rows. With Rows::first_slot the rows of a token's
// further slots on this rank are then filled from the one that crossed the link; with grouped
// layouts the padding between segments is zeroed, with `tokens` the rows of each slot are listed.
#include "kernels/cuda/choices.cuh"
#include "kernels/cuda/fill_rows.cuh"
#include "kernels/cuda/launch.hpp"
#include "kernels/cuda/list_choices.cuh"
#include "kernels/cuda/signals.cuh"
#include "kernels/scale_places.hpp"

namespace wherry::kernels::cuda {

namespace {

constexpr int kThreads = 1024;

// A block, wherever the layout of the plane has them.
__device__ void zero_scales(const DispatchRecvArgs& args, std::int32_t row) {
  const layout::WindowLayout& layout = args.context.layout;
  const auto rows = static_cast<std::int64_t>(layout.row_capacity);
  auto* plane = own_window_at<std::byte>(args.context, layout.scale_plane(args.generation));
  const std::int64_t places = num_scale_places(args.format);
  const bool words = args.format.scale_type == ScaleType::f32;
  for (std::int64_t block = threadIdx.x; block < places; block += blockDim.x) {
    std::byte* scale = plane + scale_place(args.format, rows, row, block);
    if (words) {
      *reinterpret_cast<float*>(scale) = 0.0F;
    } else {
      *scale = std::byte{0};
    }
  }
  if (args.format.wire == Wire::nvfp4 && threadIdx.x == 0) {
    *reinterpret_cast<float*>(plane + row_scale_place(args.format, rows, row)) = 0.0F;
  }
}

// A GEMM reads whole segments: padding must not carry NaN of an earlier step.
__device__ void zero_padding(const DispatchRecvArgs& args) {
  const RankContext& context = args.context;
  const layout::WindowLayout& layout = context.layout;
  const auto units = static_cast<std::uint32_t>(layout.row_pitch / sizeof(uint4));
  for (int slot = static_cast<int>(blockIdx.x); slot < args.lists.local_slots;
       slot += static_cast<int>(gridDim.x)) {
    const std::int32_t end = args.plan.slot_begin[slot + 1];
    for (std::int32_t row = args.plan.slot_begin[slot] + args.plan.slot_counts[slot]; row < end;
         ++row) {
      auto* to = window_at<uint4>(context, context.rank,
                                  layout.row(args.generation, static_cast<std::uint64_t>(row)));
      for (std::uint32_t at = threadIdx.x; at < units; at += blockDim.x) to[at] = uint4{};
      if (threadIdx.x == 0) {
        *own_window_at<float>(
            context, layout.scalar(args.generation, static_cast<std::uint64_t>(row))) = 0.0F;
      }
      if (args.format.scale_type != ScaleType::none) zero_scales(args, row);
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    dispatch_recv(const __grid_constant__ RankTable<DispatchRecvArgs> table) {
  constexpr auto kChannel = static_cast<std::uint32_t>(layout::Channel::dispatch);
  const DispatchRecvArgs& args = table.rank[blockIdx.y];
  const RankContext& context = args.context;
  std::uint32_t& received = context.state->received[kChannel][args.generation];
  const StageBegin begin = begin_stage(context, received);
  if (begin.failed) return;
  const StageInfo info{Stage::dispatch_recv, layout::Channel::dispatch, args.generation,
                       begin.epoch};
  const bool complete = wait_for_peers(
      context, info, [&](int peer) { return std::int64_t{args.plan.token_rows_from[peer]}; });
  if (!complete) return;
  const PlanArrays& plan = args.plan;
  if (ranks_that_fill(context, args.rows, plan.token_rows_to, plan.token_rows_from, lane_index()) !=
      0) {
    fill_further_slots(context, args.generation, plan.token_rows_from, args.scale_pitch, gridDim.x);
  }
  if (args.lists.choices != nullptr) {
    __shared__ std::int32_t begins[kListedSlots];
    list_choices(context, args.plan, args.generation, args.lists, begins, kListedSlots);
  } else {
    zero_padding(args);
  }
  if (threadIdx.x == 0 && is_last_to_leave(*context.state, Arrival::dispatch_received, gridDim.x)) {
    received = begin.epoch;
  }
}

}  // namespace

cudaError_t launch_dispatch_recv(const RankTable<DispatchRecvArgs>& table, int ranks, int blocks,
                                 cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(ranks));
  dispatch_recv<<<grid, kThreads, 0, stream>>>(table);
  return cudaGetLastError();
}

}  // namespace wherry::kernels::cuda
