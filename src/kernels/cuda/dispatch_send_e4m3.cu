// Stage 3, dispatch_send of bf16 rows as e4m3_block128, quantised on the way. Two kernels: bulk copies
// (sm_90), and ordinary copies.
//
// Bulk: a warp takes (token, piece) items in turn, each with two buffers. While a piece is quantised in shared
// memory the next one is loaded and the one before it is stored, once per destination by the lane that has it.
#include "kernels/cuda/choices.cuh"
#include "kernels/cuda/dispatch_stage.cuh"
#include "kernels/cuda/items.cuh"
#include "kernels/cuda/launch.hpp"
#include "kernels/cuda/overlap.cuh"
#include "kernels/cuda/pipeline.cuh"
#include "kernels/cuda/quantise.cuh"
#include "kernels/cuda/row_pieces.cuh"
#include "kernels/cuda/signals.cuh"

namespace wherry::kernels::cuda {

namespace {

// --- Bulk copies ------------------------------------------------------------------------------

constexpr int kBulkThreads = 512;
constexpr int kBulkWarps = kBulkThreads / kWarpLanes;
constexpr int kBuffers = 2;
constexpr int kMostSteps = 4;  // of a piece: what two buffers for 16 warps have room for

__global__ void __launch_bounds__(kBulkThreads, 1)
    dispatch_send_e4m3_bulk(const __grid_constant__ RankTable<DispatchSendArgs> table,
                            const Pieces pieces) {
#ifdef WHERRY_HAS_BULK_COPY
  extern __shared__ __align__(128) std::byte staging[];
  __shared__ std::uint64_t loaded[kBulkWarps][kBuffers];
  const DispatchSendArgs& args = table.rank[blockIdx.y];
  const DispatchBegin begin = begin_dispatch_send(args);
  if (begin.failed) return;

  const int lane = lane_index();
  const auto warp = static_cast<std::uint32_t>(warp_index());
  const Chunk all{0, static_cast<std::uint32_t>(args.plan.tokens)};
  const auto row_bytes = static_cast<std::uint32_t>(args.context.layout.row_pitch);
  const std::uint32_t count = all.end * pieces.of_row;
  Items items(*args.context.state, Arrival::dispatch_sent, count, blockIdx.x * kBulkWarps + warp,
              gridDim.x * kBulkWarps, kBuffers + 1);
  std::uint32_t item_at[kBuffers] = {items.next(), items.next()};
  Buffers buffers[kBuffers];
#pragma unroll
  for (std::uint32_t b = 0; b < kBuffers; ++b) {
    std::byte* const at =
        staging + (warp * kBuffers + b) * piece_bytes(1, true, true) * pieces.steps;
    buffers[b].source = at;
    buffers[b].row = at + pieces.steps * kStepSourceBytes;
    buffers[b].scales = buffers[b].row + pieces.steps * kStepBytes;
    buffers[b].loaded = &loaded[warp][b];
    if (lane == 0) barrier_init(shared_address(buffers[b].loaded), 1);
  }
  if (lane == 0) barrier_init_fence();
  __syncwarp();
  const auto load = [&](std::uint32_t at, const Buffers& to) {
    if (at < count) load_piece<true>(args.send, item_of(all, pieces, row_bytes, at), to);
  };
  const auto choice_of = [&](std::uint32_t at) {
    return at < count ? load_choice(args.plan, args.context.topk, at / pieces.of_row, lane)
                      : Choice{};
  };
  load(item_at[0], buffers[0]);
  load(item_at[1], buffers[1]);
  Choice next = choice_of(item_at[0]);

  // The item of a buffer, behind which the one in the other comes; `parity` is that of the buffer's load.
  const auto send = [&](std::uint32_t& mine_at, std::uint32_t next_at, const Buffers& mine,
                        std::uint32_t parity) {
    const Item item = item_of(all, pieces, row_bytes, mine_at);
    const Choice choice = next;
    next = choice_of(next_at);
    // Every lane commits a group for every item, so this is about the buffer that is used now.
    bulk_wait_read<kBuffers - 1>();
    __syncwarp();
    wait_for_piece(mine, parity);
    quantise_piece(item, mine.source, mine);
    fence_shared_to_bulk();
    __syncwarp();
    mine_at = items.next();
    load(mine_at, mine);
    const Destinations destinations =
        destinations_of(args.context, args.send, choice, begin.fills, lane);
    if (((destinations.lanes >> lane) & 1U) != 0) {
      bulk_store(destinations.to + item.first_step * kStepBytes, shared_address(mine.row),
                 item.bytes, args.send.rows_stay);
      bulk_store(scales_at(args.context, args.send, choice.dest, destinations.row) +
                     item.first_step * kStepScaleBytes,
                 shared_address(mine.scales), scale_bytes_of(args.send, item, pieces),
                 args.send.rows_stay);
    }
    bulk_commit();
    if (args.send.entries && item.piece == 0) {
      write_entries(args.context, args.send, choice, destinations.first_of_rank, lane);
    }
  };
  std::uint32_t parity = 0;
#pragma unroll 1
  while (item_at[0] < count) {
#pragma unroll
    for (std::uint32_t b = 0; b < kBuffers; ++b) {
      if (item_at[b] < count) send(item_at[b], item_at[1 - b], buffers[b], parity);
    }
    parity ^= 1U;
  }
  bulk_wait_written();
  finish_dispatch_send(args, begin);
#endif
}

// --- Ordinary copies ----------------------------------------------------------------------------

constexpr int kCopyThreads = 1024;

// What a lane loads of a (token, piece) item; the next item's is loaded while this one is stored.
struct PieceOfToken {
  Choice choice;
  LaneBlock block;
};
__device__ PieceOfToken load_of_token(const DispatchSendArgs& args, std::uint32_t item,
                                      std::uint32_t items, std::uint32_t pieces,
                                      std::uint32_t hidden, int lane) {
  PieceOfToken loaded{};
  if (item >= items) return loaded;
  const std::uint32_t token = item / pieces;
  const std::uint32_t element =
      item % pieces * kPieceElements + static_cast<std::uint32_t>(lane * kLaneElements);
  if (element < hidden) {  // hidden is a multiple of 16
    load_elements(args.send.x + token * args.send.x_pitch + element * 2, loaded.block.packed);
  }
  loaded.choice = load_choice(args.plan, args.context.topk, token, lane);
  return loaded;
}

__global__ void __launch_bounds__(kCopyThreads)
    dispatch_send_e4m3(const __grid_constant__ RankTable<DispatchSendArgs> table,
                       std::uint32_t hidden) {
  const DispatchSendArgs& args = table.rank[blockIdx.y];
  const DispatchBegin begin = begin_dispatch_send(args);
  if (begin.failed) return;

  const int lane = lane_index();
  const std::uint32_t warps = blockDim.x / kWarpLanes;
  const std::uint32_t pieces = (hidden + kPieceElements - 1) / kPieceElements;
  const std::uint32_t count = static_cast<std::uint32_t>(args.plan.tokens) * pieces;
  Items items(*args.context.state, Arrival::dispatch_sent, count,
              blockIdx.x * warps + static_cast<std::uint32_t>(warp_index()), gridDim.x * warps);
  std::uint32_t item = items.next();
  PieceOfToken next = load_of_token(args, item, count, pieces, hidden, lane);
  while (item < count) {
    const std::uint32_t coming = items.next();
    const Choice choice = next.choice;
    LaneBlock made[1] = {next.block};
    quantise(made);
    const uint4 bytes = made[0].codes;
    const float scale = made[0].scale;
    next = load_of_token(args, coming, count, pieces, hidden, lane);
    const Destinations destinations =
        destinations_of(args.context, args.send, choice, begin.fills, lane);
    const std::uint32_t piece = item % pieces;
    const std::uint32_t element =
        piece * kPieceElements + static_cast<std::uint32_t>(lane * kLaneElements);
    const bool inside = element < hidden;
    std::byte* my_scales = nullptr;
    if (((destinations.lanes >> lane) & 1U) != 0) {
      my_scales = scales_at(args.context, args.send, choice.dest, destinations.row);
    }
    const bool writes_scale = inside && lane % kLanesPerBlock == 0;
    for_each_lane(destinations.lanes, [&](int source) {
      auto* to = reinterpret_cast<std::byte*>(
          __shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(destinations.to), source));
      if (inside && args.send.rows_stay) *reinterpret_cast<uint4*>(to + element) = bytes;
      if (inside && !args.send.rows_stay) __stcs(reinterpret_cast<uint4*>(to + element), bytes);
      auto* scales = reinterpret_cast<float*>(
          __shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(my_scales), source));
      if (writes_scale) scales[element / kBlockElements] = scale;
    });
    if (args.send.entries && piece == 0) {
      write_entries(args.context, args.send, choice, destinations.first_of_rank, lane);
    }
    item = coming;
  }
  finish_dispatch_send(args, begin);
}

}  // namespace

E4m3Shape choose_e4m3_shape(const DispatchJob& job) {
  // Two GPUs, 4096 tokens: 8 SMs 433 -> 355 us, 16 222 -> 185, 24 153 -> 129, but 64 109 -> 112; with 128 tokens
  // on 64 SMs a microsecond more.
  constexpr int kManySms = 64;
  constexpr std::int64_t kManyTokens = 8;  // of a multiprocessor
  E4m3Shape shape{job.num_sms, 0, 0};
  if (!job.bulk || !job.link || job.num_sms >= kManySms || job.tokens < kManyTokens * job.num_sms) {
    return shape;
  }
  const auto steps = static_cast<std::uint32_t>((job.row_bytes + kStepBytes - 1) / kStepBytes);
  const auto [pieces, each] = layout::even_parts(steps, (steps + kMostSteps - 1) / kMostSteps);
  shape.pieces = static_cast<int>(pieces);
  shape.piece_steps = static_cast<int>(each);
  return shape;
}

cudaError_t launch_dispatch_send_e4m3(const RankTable<DispatchSendArgs>& table, int ranks,
                                      const E4m3Shape& shape, std::int64_t hidden,
                                      cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(shape.blocks), static_cast<unsigned>(ranks));
  const bool overlaps = table.rank[0].send.overlaps;
  if (shape.pieces == 0) {
    return launch_kernel(overlaps, dispatch_send_e4m3, grid, kCopyThreads, 0, stream, table,
                         static_cast<std::uint32_t>(hidden));
  }
  const Pieces pieces{static_cast<std::uint32_t>(shape.pieces),
                      static_cast<std::uint32_t>(shape.piece_steps), true};
  const std::size_t shared = piece_bytes(shape.piece_steps, true, true) * kBulkWarps * kBuffers;
  return launch_kernel(overlaps, dispatch_send_e4m3_bulk, grid, kBulkThreads, shared, stream, table,
                       pieces);
}

cudaError_t prepare_dispatch_send_e4m3() {
  int bytes = 0;
  const cudaError_t asked = shared_bytes_of_block(bytes);
  if (asked != cudaSuccess) return asked;
  return cudaFuncSetAttribute(dispatch_send_e4m3_bulk, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              bytes);
}

}  // namespace wherry::kernels::cuda
