// Stage 3, dispatch_send: every row of x to its final place in the windows of the ranks that hold
// its experts, then one signal to each peer. Two kernels: bulk copies (sm_90), and ordinary copies of
// any row. (Rows that are quantised on the way: dispatch_send_e4m3.cu, dispatch_send_converted.cu.)
//
// Bulk: a warp takes tokens, or pieces of them. One elected lane keeps loads of the coming pieces in flight
// and stores each piece once per destination straight from shared memory; the other lanes find the
// destinations and write the TokenEntry records meanwhile. What limits few SMs is bytes in flight, so all of
// shared memory is used, and a piece's memory is loaded again as soon as its stores have read it, not when
// they have been written. Behind those stores every other load takes long: places and items are asked for a
// token before they are needed.
#include "kernels/cuda/choices.cuh"
#include "kernels/cuda/dispatch_stage.cuh"
#include "kernels/cuda/items.cuh"
#include "kernels/cuda/launch.hpp"
#include "kernels/cuda/overlap.cuh"
#include "kernels/cuda/pipeline.cuh"
#include "kernels/cuda/signals.cuh"

namespace wherry::kernels::cuda {

namespace {

constexpr int kBulkThreads = 512;
constexpr int kMaxBulkPieces = 64;                      // in the shared memory of a block
constexpr std::uint32_t kBulkSharedBytes = 224 * 1024;  // of 227 KiB a block may have
constexpr int kCopyThreads = 1024;

// --- Bulk copies ------------------------------------------------------------------------------

#ifdef WHERRY_HAS_BULK_COPY
// What a warp sends, in order, known some items ahead.
class Sequence {
 public:
  __device__ explicit Sequence(const Items& items) : items_(items) {}
  // All lanes. Item `number` of the warp; no more than 31 before the largest number asked for.
  __device__ std::uint32_t at(std::uint32_t number) {
    for (; known_ <= number; ++known_) {
      const std::uint32_t item = items_.next();
      if (lane_index() == static_cast<int>(known_ % kWarpLanes)) held_ = item;
    }
    return __shfl_sync(kAllLanes, held_, static_cast<int>(number % kWarpLanes));
  }

 private:
  Items items_;
  std::uint32_t known_ = 0;
  std::uint32_t held_ = 0;  // of each lane: the item whose number it is, modulo the lanes
};
#endif

// The first `warps` warps copy; the others help with the lists.
template <int kStoresInFlight>
__global__ void __launch_bounds__(kBulkThreads, 1)
    dispatch_send_bulk(const __grid_constant__ RankTable<DispatchSendArgs> table,
                       const DispatchShape shape) {
#ifdef WHERRY_HAS_BULK_COPY
  extern __shared__ __align__(128) std::byte staging[];
  __shared__ __align__(8) std::uint64_t barriers[kMaxBulkPieces];
  const DispatchSendArgs& args = table.rank[blockIdx.y];
  const DispatchBegin begin = begin_dispatch_send(args);
  if (begin.failed) return;

  const int lane = lane_index();
  const auto warp = static_cast<std::uint32_t>(warp_index());
  const auto warps = static_cast<std::uint32_t>(shape.warps);
  const auto stages = static_cast<std::uint32_t>(shape.stages);
  const std::uint32_t piece_bytes = shape.piece_bytes;
  const bool elected = lane == 0;
  const auto row_bytes = static_cast<std::uint32_t>(args.context.layout.row_bytes);
  const std::uint32_t row_pieces = (row_bytes + piece_bytes - 1) / piece_bytes;
  const std::uint32_t pieces = shape.whole_rows ? row_pieces : 1;  // of an item
  const std::uint32_t parts = shape.whole_rows ? 1 : row_pieces;   // items of a token
  const std::uint32_t count =
      warp < warps ? static_cast<std::uint32_t>(args.plan.tokens) * parts : 0;
  const std::uint32_t own = (stages + pieces - 1) / pieces + 1;  // enough for the first loads
  Sequence sequence({*args.context.state, Arrival::dispatch_sent, count, blockIdx.x * warps + warp,
                     gridDim.x * warps, own});

  const std::uint32_t my_staging = shared_address(staging) + warp * stages * piece_bytes;
  const std::uint32_t my_barriers = shared_address(barriers) + 8 * warp * stages;
  const auto offset_of = [&](std::uint32_t item, std::uint32_t piece) {
    return (item % parts * pieces + piece) * piece_bytes;
  };
  std::uint32_t load_number = 0;
  std::uint32_t load_piece = 0;
  std::uint32_t load_item = sequence.at(0);
  const auto load_next = [&](std::uint32_t stage) {
    if (load_item >= count) return;
    if (elected) {
      const std::uint32_t offset = offset_of(load_item, load_piece);
      const std::uint32_t bytes = min(piece_bytes, row_bytes - offset);
      barrier_expect_bytes(my_barriers + 8 * stage, bytes);
      bulk_load(my_staging + stage * piece_bytes,
                args.send.x + load_item / parts * args.send.x_pitch + offset, bytes,
                my_barriers + 8 * stage);
    }
    if (++load_piece < pieces) return;
    load_piece = 0;
    load_item = sequence.at(++load_number);
  };
  if (elected && count > 0) {
    for (std::uint32_t stage = 0; stage < stages; ++stage) barrier_init(my_barriers + 8 * stage, 1);
    barrier_init_fence();
  }
  __syncwarp();
  for (std::uint32_t stage = 0; stage < stages; ++stage) load_next(stage);

  Choice next = load_choice(args.plan, args.context.topk, sequence.at(0) / parts, lane);
  std::uint32_t index = 0;  // of a piece
  std::uint32_t stage = 0;
  std::uint32_t parity = 0;
  for (std::uint32_t number = 0;; ++number) {
    const std::uint32_t item = sequence.at(number);
    if (item >= count) break;
    const Choice choice = next;
    next = load_choice(args.plan, args.context.topk, sequence.at(number + 1) / parts, lane);
    const Destinations destinations =
        destinations_of(args.context, args.send, choice, begin.fills, lane);
    for (std::uint32_t piece = 0; piece < pieces; ++piece, ++index) {
      const std::uint32_t offset = offset_of(item, piece);
      if (elected) barrier_wait(my_barriers + 8 * stage, parity);
      for_each_lane(destinations.lanes, [&](int source) {
        const auto to =
            __shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(destinations.to), source);
        if (!elected) return;
        // Not send.rows_stay: to ask at run time took 193 us over a link where 187 do (16 SMs).
        bulk_store(reinterpret_cast<std::byte*>(to) + offset, my_staging + stage * piece_bytes,
                   min(piece_bytes, row_bytes - offset), false);
      });
      if (elected) {
        bulk_commit();
        // The stores of piece (index - kStoresInFlight) have read their memory: load it again.
        bulk_wait_read<kStoresInFlight>();
      }
      if (index >= kStoresInFlight) {
        load_next(stage >= kStoresInFlight ? stage - kStoresInFlight
                                           : stage + stages - kStoresInFlight);
      }
      if (++stage == stages) {
        stage = 0;
        parity ^= 1;
      }
    }
    if (args.send.entries && item % parts == 0) {
      write_entries(args.context, args.send, choice, destinations.first_of_rank, lane);
    }
  }
  if (elected) bulk_wait_written();
  const std::uint32_t words = warps * stages * piece_bytes / sizeof(std::int32_t);
  finish_dispatch_send(
      args, begin, {reinterpret_cast<std::int32_t*>(staging), static_cast<std::int32_t>(words)});
#endif
}

// --- Ordinary copies ----------------------------------------------------------------------------

// Any row: Unit is the widest type that divides rows, pitch and address.
template <typename Unit>
__global__ void __launch_bounds__(kCopyThreads)
    dispatch_send_copy(const __grid_constant__ RankTable<DispatchSendArgs> table,
                       std::uint32_t piece_bytes) {
  const DispatchSendArgs& args = table.rank[blockIdx.y];
  const DispatchBegin begin = begin_dispatch_send(args);
  if (begin.failed) return;

  const int lane = lane_index();
  const std::uint32_t warps = blockDim.x / kWarpLanes;
  const auto row_bytes = static_cast<std::uint32_t>(args.context.layout.row_bytes);
  const std::uint32_t pieces = (row_bytes + piece_bytes - 1) / piece_bytes;
  const std::uint32_t count = static_cast<std::uint32_t>(args.plan.tokens) * pieces;

  Items items(*args.context.state, Arrival::dispatch_sent, count,
              blockIdx.x * warps + static_cast<std::uint32_t>(warp_index()), gridDim.x * warps);
  for (std::uint32_t item = items.next(); item < count; item = items.next()) {
    const std::uint32_t token = item / pieces;
    const std::uint32_t piece = item % pieces;
    const Choice choice = load_choice(args.plan, args.context.topk, token, lane);
    const Destinations destinations =
        destinations_of(args.context, args.send, choice, begin.fills, lane);
    const std::uint32_t begin_unit = piece * piece_bytes / sizeof(Unit);
    const std::uint32_t end_unit = min((piece + 1) * piece_bytes, row_bytes) / sizeof(Unit);
    const auto* from = reinterpret_cast<const Unit*>(args.send.x + token * args.send.x_pitch);
    copy_units(from, destinations.lanes, reinterpret_cast<Unit*>(destinations.to), begin_unit,
               end_unit, lane);
    if (args.send.entries && piece == 0) {
      write_entries(args.context, args.send, choice, destinations.first_of_rank, lane);
    }
  }
  finish_dispatch_send(args, begin);
}

// --- Launching ----------------------------------------------------------------------------------

template <int kStoresInFlight>
cudaError_t launch_bulk(const RankTable<DispatchSendArgs>& table, int ranks,
                        const DispatchShape& shape, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(shape.blocks), static_cast<unsigned>(ranks));
  const std::size_t shared =
      static_cast<std::size_t>(shape.warps * shape.stages) * shape.piece_bytes;
  const bool lists = table.rank[0].lists.choices != nullptr;
  const int threads = lists ? kBulkThreads : shape.warps * kWarpLanes;
  return launch_kernel(table.rank[0].send.overlaps, dispatch_send_bulk<kStoresInFlight>, grid,
                       threads, shared, stream, table, shape);
}

template <typename Unit>
cudaError_t launch_copy(const RankTable<DispatchSendArgs>& table, int ranks,
                        const DispatchShape& shape, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(shape.blocks), static_cast<unsigned>(ranks));
  return launch_kernel(table.rank[0].send.overlaps, dispatch_send_copy<Unit>, grid, kCopyThreads, 0,
                       stream, table, shape.piece_bytes);
}

template <int kStoresInFlight>
cudaError_t allow_shared() {
  return cudaFuncSetAttribute(dispatch_send_bulk<kStoresInFlight>,
                              cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(kBulkSharedBytes));
}

}  // namespace

DispatchShape choose_dispatch_shape(const DispatchJob& job) {
  constexpr std::uint64_t kSmallestPiece = 1024;
  const auto pieces_of = [&](std::uint64_t largest) {
    return (job.row_bytes + largest - 1) / largest;
  };
  const auto piece_bytes = [&](std::uint64_t pieces) {
    return static_cast<std::uint32_t>(layout::round_up((job.row_bytes + pieces - 1) / pieces, 16));
  };
  const auto tokens = static_cast<std::uint64_t>(job.tokens > 0 ? job.tokens : 1);
  const auto sms = static_cast<std::uint64_t>(job.num_sms);
  if (!job.bulk) {
    // A warp a piece, 32 warps a block: split rows only where there are fewer tokens than warps.
    constexpr int kWarps = kCopyThreads / kWarpLanes;
    const std::uint64_t wanted = sms * kWarps / tokens;
    const std::uint64_t most = pieces_of(kSmallestPiece);
    return {job.num_sms, kWarps, 0, 0,
            piece_bytes(wanted < 1 ? 1 : (wanted > most ? most : wanted))};
  }
  // Where a row is stored a few times only, loads are a larger share and want half rows, more of
  // them in flight (4 ranks x 16 SMs: 336 -> 311 us); where it is stored often, whole rows.
  const bool few_copies = job.copies < 4.5;
  DispatchShape shape{job.num_sms, 4, few_copies ? 6 : 3, few_copies ? 2 : 1, 0};
  // Where what multiprocessors can write is the limit, more warps (8 ranks x 4 SMs: 1430 -> 1382 us), and over a
  // link (16 SMs: 191 -> 178 us), where one may get a third of what another gets.
  constexpr int kFewSms = 4;
  if (job.num_sms <= kFewSms) shape = {job.num_sms, 8, 3, 1, 0};
  if (job.link) shape = {job.num_sms, 7, 4, 2, 0};
  const std::uint64_t largest =
      kBulkSharedBytes / static_cast<std::uint64_t>(shape.warps * shape.stages) / 128 * 128;
  std::uint64_t pieces = pieces_of(largest);
  const auto warps = static_cast<std::uint64_t>(shape.blocks * shape.warps);
  while (tokens * pieces < warps && job.row_bytes / (pieces * 2) >= kSmallestPiece) pieces *= 2;
  // With few tokens a warp, one more or less would show.
  constexpr std::uint64_t kManyTokens = 16;
  shape.whole_rows = tokens >= kManyTokens * warps;
  shape.piece_bytes = piece_bytes(pieces);
  return shape;
}

cudaError_t launch_dispatch_send(const RankTable<DispatchSendArgs>& table, int ranks,
                                 const DispatchShape& shape, cudaStream_t stream) {
  if (shape.stages != 0) {
    if (shape.warps * shape.stages > kMaxBulkPieces) return cudaErrorInvalidConfiguration;
    switch (shape.stores_in_flight) {
      case 1: return launch_bulk<1>(table, ranks, shape, stream);
      case 2: return launch_bulk<2>(table, ranks, shape, stream);
      case 3: return launch_bulk<3>(table, ranks, shape, stream);
      case 4: return launch_bulk<4>(table, ranks, shape, stream);
      default: return cudaErrorInvalidConfiguration;
    }
  }
  std::uint64_t odd = 16;
  for (int rank = 0; rank < ranks; ++rank) {
    const DispatchSendArgs& args = table.rank[rank];
    odd |= args.context.layout.row_bytes | args.send.x_pitch |
           reinterpret_cast<std::uintptr_t>(args.send.x) | shape.piece_bytes;
  }
  if (odd % 16 == 0) return launch_copy<uint4>(table, ranks, shape, stream);
  if (odd % 4 == 0) return launch_copy<std::uint32_t>(table, ranks, shape, stream);
  if (odd % 2 == 0) return launch_copy<std::uint16_t>(table, ranks, shape, stream);
  return launch_copy<std::uint8_t>(table, ranks, shape, stream);
}

cudaError_t has_bulk_copies(int device, bool& has) {
  int major = 0;
  int shared = 0;
  cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  }
  // sm_120 has the instructions and 99 KiB: its rows go by ordinary copies.
  has = major >= 9 && shared >= static_cast<int>(kBulkSharedBytes);
  return error;
}

cudaError_t prepare_dispatch_send() {
  int device = 0;
  bool bulk = false;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = has_bulk_copies(device, bulk);
  if (error != cudaSuccess || !bulk) return error;
  for (const cudaError_t each :
       {allow_shared<1>(), allow_shared<2>(), allow_shared<3>(), allow_shared<4>()}) {
    if (each != cudaSuccess) return each;
  }
  return cudaSuccess;
}

}  // namespace wherry::kernels::cuda
