// Stage 3, dispatch_recv: waits for every peer's rows. With Rows::first_slot the rows of a token's
// further slots on this rank are then filled from the one that crossed the link; with grouped
// layouts the padding between segments is zeroed, with `tokens` the rows of each slot are listed.
#include "kernels/cuda/choices.cuh"
#include "kernels/cuda/items.cuh"
#include "kernels/cuda/launch.hpp"
#include "kernels/cuda/list_choices.cuh"
#include "kernels/cuda/signals.cuh"
#include "kernels/scale_places.hpp"

namespace wherry::kernels::cuda {

namespace {

constexpr int kThreads = 1024;

// One warp: `units` 16-byte units of one row to the rows of the lanes in `targets`.
__device__ void fill_rows(const uint4* from, unsigned targets, uint4* to, std::uint32_t units,
                          int lane) {
  constexpr int kUnitsInFlight = 4;
  for (std::uint32_t base = 0; base < units; base += kUnitsInFlight * kWarpLanes) {
    uint4 unit[kUnitsInFlight];
#pragma unroll
    for (int i = 0; i < kUnitsInFlight; ++i) {
      const std::uint32_t at = base + static_cast<std::uint32_t>(i * kWarpLanes + lane);
      if (at < units) unit[i] = __ldcs(from + at);
    }
    for_each_lane(targets, [&](int source) {
      auto* target = reinterpret_cast<uint4*>(
          __shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(to), source));
#pragma unroll
      for (int i = 0; i < kUnitsInFlight; ++i) {
        const std::uint32_t at = base + static_cast<std::uint32_t>(i * kWarpLanes + lane);
        if (at < units) target[at] = unit[i];
      }
    });
  }
}

// Returns Items::any_taken().
__device__ bool fill_further_slots(const DispatchRecvArgs& args) {
  const RankContext& context = args.context;
  const layout::WindowLayout& layout = context.layout;
  const int lane = lane_index();
  const auto token_rows = static_cast<std::uint32_t>(args.plan.totals[kTokenRowsReceived]);
  const auto units = static_cast<std::uint32_t>(layout.row_pitch / sizeof(uint4));
  const std::uint32_t warps = blockDim.x / kWarpLanes;
  std::uint32_t token_row = blockIdx.x * warps + static_cast<std::uint32_t>(warp_index());
  Items items(*context.state, Arrival::dispatch_received, token_rows, gridDim.x * warps);
  for (; token_row < token_rows; token_row = items.next()) {
    const auto* entries = window_at<layout::TokenEntry>(
        context, context.rank, layout.token_entries(args.generation, token_row));
    const std::int32_t position = lane < context.topk ? entries[lane].position : -1;
    const unsigned here = __ballot_sync(kAllLanes, position >= 0);
    const bool distinct = is_first_with(position, lane);
    const unsigned rows = __ballot_sync(kAllLanes, distinct);
    auto* row = window_at<uint4>(
        context, context.rank,
        layout.row(args.generation, static_cast<std::uint64_t>(position >= 0 ? position : 0)));
    const int filled =
        __ffs(static_cast<int>(here)) - 1;  // the sender wrote the first choice's row
    const auto* from = reinterpret_cast<const uint4*>(
        __shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(row), filled));
    fill_rows(from, rows & (rows - 1), row, units, lane);
  }
  return items.any_taken();
}

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
  if (args.rows == Rows::first_slot && fill_further_slots(args)) __syncthreads();
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
