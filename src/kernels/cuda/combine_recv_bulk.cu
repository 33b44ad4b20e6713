// Stage 5, combine_recv over a link: as combine_recv.cu, but rows come by bulk loads into shared memory and
// are summed from there. What limits a pull over a link is bytes in flight: the registers of a block hold
// 128 KiB of loads for as long as a peer takes to answer, its shared memory holds 224.
//
// A warp works alone: it takes an equal share of all pieces of all tokens, in order, and has a ring of
// slots, each a piece of one row. It issues the loads of the coming pieces, each into as many slots as the
// token has terms, until the ring is full; then it sums the oldest piece and refills.
#include "kernels/cuda/combine_stage.cuh"
#include "kernels/cuda/combine_terms.cuh"
#include "kernels/cuda/launch.hpp"
#include "kernels/cuda/overlap.cuh"
#include "kernels/cuda/pipeline.cuh"
#include "kernels/cuda/row_parts.cuh"
#include "kernels/cuda/signals.cuh"

namespace wherry::kernels::cuda {

namespace {

constexpr int kMaxWarps = 16;
constexpr std::uint32_t kMaxSlots = 64;
constexpr std::uint32_t kSharedBytes = 224 * 1024;  // of all slots; a block may have 227 KiB
constexpr std::uint32_t kItems = 8;                 // pieces of a warp on their way, a power of two

#ifdef WHERRY_HAS_BULK_COPY

// What a warp needs of all its pieces.
struct Share {
  std::uint32_t pieces;      // of a row
  std::uint32_t begin, end;  // of all pieces of all tokens
  std::uint32_t vectors, piece_vectors;
  std::uint32_t piece_bytes, slots;
  std::uint32_t staging;     // of its slots in the block's shared memory
  std::uint32_t first_slot;  // the same as a shared address
  std::uint32_t barriers;    // [kItems], shared address
  std::uint32_t* counts;     // [kItems] terms
};

// The side of the loads. All lanes.
class Loads {
 public:
  __device__ Loads(const CombineRecvArgs& args, const Share& share, int lane)
      : args_(args),
        share_(share),
        lane_(lane),
        piece_(share.begin % share.pieces),
        token_(share.begin / share.pieces),
        at_(share.begin),
        free_(share.slots) {
    coming_ = load_choice(args.plan, args.context.topk, token_, lane);
  }
  __device__ void find_terms() {
    mine_ = find_term<Sum::token_rows>(args_, source_of<Sum::token_rows>(args_, coming_), lane_);
    count_ = static_cast<std::uint32_t>(__popc(mine_.lanes));
    coming_ = load_choice(args_.plan, args_.context.topk, token_ + 1, lane_);
  }
  // As many pieces as there is room for.
  __device__ void issue() {
    while (at_ < share_.end && free_ >= count_ && issued_ - summed_ < kItems) {
      const std::uint32_t first = piece_ * share_.piece_vectors;
      const std::uint32_t bytes = min(share_.piece_vectors, share_.vectors - first) *
                                  static_cast<std::uint32_t>(sizeof(uint4));
      const std::uint32_t item = issued_ % kItems;
      const std::uint32_t barrier = share_.barriers + 8 * item;
      if (lane_ == 0) {
        share_.counts[item] = count_;
        barrier_expect_bytes(barrier, count_ * bytes);
      }
      __syncwarp();
      if (mine_.present) {
        std::uint32_t slot = slot_ + static_cast<std::uint32_t>(mine_.order);
        if (slot >= share_.slots) slot -= share_.slots;
        bulk_load(share_.first_slot + slot * share_.piece_bytes,
                  mine_.term.row + first * sizeof(uint4), bytes, barrier);
      }
      free_ -= count_;
      slot_ += count_;
      if (slot_ >= share_.slots) slot_ -= share_.slots;
      ++issued_;
      ++at_;
      if (++piece_ == share_.pieces) {
        piece_ = 0;
        ++token_;
        if (at_ < share_.end) find_terms();
      }
    }
  }
  __device__ void has_summed(std::uint32_t count) {
    free_ += count;
    ++summed_;
  }

 private:
  const CombineRecvArgs& args_;
  const Share& share_;
  int lane_;
  std::uint32_t piece_, token_, at_, free_;
  std::uint32_t count_ = 0, slot_ = 0, issued_ = 0, summed_ = 0;
  Choice coming_;  // of the token after this one: it comes from far
  LaneTerm mine_{};
};

// Where the terms of a piece lie in the block's shared memory.
struct Slots {
  const Share& share;
  std::uint32_t first;

  [[nodiscard]] __device__ std::uint32_t of(std::uint32_t term) const {
    std::uint32_t which = first + term;
    if (which >= share.slots) which -= share.slots;
    return share.staging + which * share.piece_bytes;
  }
};

// kVectors vectors a lane, from `at` on, of kCount terms. All are asked for before one is added.
template <typename Element, int kCount, int kVectors>
__device__ void sum_vectors(const std::uint32_t (&terms)[kCount], uint4* out, std::uint32_t at) {
  extern __shared__ __align__(128)
      std::byte staging[];  // by name: its loads know that it is shared
  uint4 loaded[kVectors][kCount];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      loaded[v][i] = reinterpret_cast<const uint4*>(staging + terms[i])[at + v * kWarpLanes];
    }
  }
  float sums[kVectors][Element::kOfVector] = {};
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) add_vector<Element, false>(sums[v], loaded[v][i], 1.0F);
  }
  uint4 rounded[kVectors];
  Element::round(sums, rounded);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) __stcs(out + at + v * kWarpLanes, rounded[v]);
}

// One piece of kCount terms: 16 bytes may be written at once, and nothing is added.
template <typename Element, int kCount>
__device__ void sum_plain(const Slots& slots, const SumTarget& target, int lane) {
  constexpr int kVectors = 4;
  std::uint32_t terms[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) terms[i] = slots.of(static_cast<std::uint32_t>(i));
  const std::uint32_t vectors = target.end - target.first;
  auto* out = reinterpret_cast<uint4*>(target.out) + target.first;
  auto at = static_cast<std::uint32_t>(lane);
#pragma unroll 1
  for (std::uint32_t left = vectors / kWarpLanes; left >= kVectors; left -= kVectors) {
    sum_vectors<Element, kCount, kVectors>(terms, out, at);
    at += kVectors * kWarpLanes;
  }
#pragma unroll 1
  for (; at < vectors; at += kWarpLanes) sum_vectors<Element, kCount, 1>(terms, out, at);
}

// One piece of any number of terms. kPlain: as above; else to any address, and with an addend if there is one.
template <typename Element, bool kPlain>
__device__ void sum_any(const Slots& slots, std::uint32_t count, const SumTarget& target,
                        int lane) {
  extern __shared__ __align__(128) std::byte staging[];
  const std::uint32_t vectors = target.end - target.first;
#pragma unroll 4
  for (auto at = static_cast<std::uint32_t>(lane); at < vectors; at += kWarpLanes) {
    float sum[Element::kOfVector] = {};
    for (std::uint32_t i = 0; i < count; ++i) {
      add_vector<Element, false>(sum, reinterpret_cast<const uint4*>(staging + slots.of(i))[at],
                                 1.0F);
    }
    if constexpr (kPlain) {
      __stcs(reinterpret_cast<uint4*>(target.out) + target.first + at, round_vector<Element>(sum));
      continue;
    }
    if (target.addend != nullptr) {
      add_vector<Element, false>(
          sum, load_odd<Element>(target.addend, target.first + at, target.row_bytes), 1.0F);
    }
    store_sum<Element>(target, target.first + at, sum);
  }
}
template <typename Element>
__device__ void sum_piece(const Slots& slots, std::uint32_t count, const SumTarget& target,
                          int lane) {
  if (!target.aligned || target.addend != nullptr) {
    return sum_any<Element, false>(slots, count, target, lane);
  }
  switch (count) {
    case 1: return sum_plain<Element, 1>(slots, target, lane);
    case 2: return sum_plain<Element, 2>(slots, target, lane);
    case 3: return sum_plain<Element, 3>(slots, target, lane);
    case 4: return sum_plain<Element, 4>(slots, target, lane);
    default: return sum_any<Element, true>(slots, count, target, lane);
  }
}

// One warp, `loads` at its first token.
template <typename Element>
__device__ void sum_share(const CombineRecvArgs& args, const Share& share, Loads& loads, int lane) {
  const auto row_bytes = static_cast<std::uint32_t>(args.context.layout.result_bytes);
  const bool aligned = out_aligned(args);
  std::uint32_t slot = 0;
  std::uint32_t index = 0;
  std::uint32_t piece = share.begin % share.pieces;
  std::uint32_t token = share.begin / share.pieces;
  for (std::uint32_t at = share.begin; at < share.end; ++at, ++index) {
    const std::uint32_t first = piece * share.piece_vectors;
    const SumTarget target{
        args.out + token * args.out_pitch,
        aligned,
        row_bytes,
        first,
        min(first + share.piece_vectors, share.vectors),
        args.addend != nullptr ? args.addend + token * args.addend_pitch : nullptr};
    barrier_wait(share.barriers + 8 * (index % kItems), index / kItems & 1U);
    const std::uint32_t count = share.counts[index % kItems];
    sum_piece<Element>({share, slot}, count, target, lane);
    __syncwarp();
    slot += count;
    if (slot >= share.slots) slot -= share.slots;
    loads.has_summed(count);
    loads.issue();
    if (++piece == share.pieces) {
      piece = 0;
      ++token;
    }
  }
}

#endif  // WHERRY_HAS_BULK_COPY

template <typename Element>
__global__ void __launch_bounds__(kMaxWarps* kWarpLanes, 1)
    combine_recv_bulk(const __grid_constant__ RankTable<CombineRecvArgs> table,
                      const CombineShape shape) {
#ifdef WHERRY_HAS_BULK_COPY
  constexpr auto kChannel = static_cast<std::uint32_t>(layout::Channel::combine);
  extern __shared__ __align__(128) std::byte staging[];
  __shared__ __align__(8) std::uint64_t barriers[kMaxWarps * kItems];
  __shared__ std::uint32_t counts[kMaxWarps * kItems];
  const CombineRecvArgs& args = table.rank[blockIdx.y];
  const RankContext& context = args.context;
  const int lane = lane_index();
  const auto warp = static_cast<std::uint32_t>(warp_index());
  touch_arguments(args, context);
  wait_for_earlier_kernels();
  const StageBegin begin = begin_stage(context, context.state->received[kChannel][args.generation]);
  if (begin.failed) return;
  if (args.overlaps) let_next_kernel_begin();
  if (args.send && blockIdx.x == 0 && warp == 0) {
    signal_results(context, args.plan, args.generation, begin.epoch);
  }
  Share share;
  share.vectors = static_cast<std::uint32_t>(context.layout.result_pitch / sizeof(uint4));
  share.piece_vectors = shape.piece_bytes / sizeof(uint4);
  share.pieces = (share.vectors + share.piece_vectors - 1) / share.piece_vectors;
  const std::uint64_t all =
      std::uint64_t{static_cast<std::uint32_t>(args.plan.tokens)} * share.pieces;
  const std::uint32_t warps_of_block = blockDim.x / kWarpLanes;
  const std::uint32_t warps = gridDim.x * warps_of_block;
  const std::uint32_t me = place_of_warp(gridDim.x);
  share.begin = static_cast<std::uint32_t>(all * me / warps);
  share.end = static_cast<std::uint32_t>(all * (me + 1) / warps);
  share.piece_bytes = shape.piece_bytes;
  share.slots = static_cast<std::uint32_t>(shape.slots);
  share.staging = warp * (kSharedBytes / warps_of_block);
  share.first_slot = shared_address(staging) + share.staging;
  share.barriers = shared_address(barriers + warp * kItems);
  share.counts = counts + warp * kItems;
  Loads loads(args, share, lane);
  if (lane < static_cast<int>(kItems)) {
    barrier_init(share.barriers + 8 * static_cast<std::uint32_t>(lane), 1);
    barrier_init_fence();
  }
  loads.find_terms();
  const bool complete = wait_for_results(args, begin.epoch);
  if (!complete) return;
  fence_acquired_to_bulk();
  loads.issue();
  sum_share<Element>(args, share, loads, lane);
  finish_combine_recv(args, begin.epoch, false);
#endif
}

template <typename Element>
cudaError_t launch(const RankTable<CombineRecvArgs>& table, int ranks, const CombineShape& shape,
                   cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(shape.blocks), static_cast<unsigned>(ranks));
  return launch_kernel(table.rank[0].overlaps, combine_recv_bulk<Element>, grid, shape.threads,
                       kSharedBytes, stream, table, shape);
}

template <typename Element>
cudaError_t allow_shared() {
  return cudaFuncSetAttribute(combine_recv_bulk<Element>,
                              cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(kSharedBytes));
}

// Blocks of `warps`, and the bytes that one has in flight of tokens with as many terms as any.
struct BulkShape {
  CombineShape shape;
  std::uint64_t in_flight;
};
BulkShape shape_of_warps(const CombineJob& job, std::uint32_t warps) {
  constexpr std::uint32_t kLine = kRowStepUnits * sizeof(uint4);
  const auto terms = static_cast<std::uint32_t>(job.most_terms);
  const std::uint32_t warp_bytes = kSharedBytes / warps;
  // One piece is summed while the next is on its way. Several to a row are whole lines, if there is room for one.
  const std::uint32_t room = warp_bytes / (2 * terms);
  const auto bytes =
      static_cast<std::uint32_t>(layout::round_up(job.row_bytes, layout::kRowAlignment));
  const std::uint32_t unit = bytes > room && room >= kLine ? kLine : layout::kRowAlignment;
  const std::uint32_t most = room / unit * unit;
  const std::uint32_t pieces = (bytes + most - 1) / most;
  CombineShape shape;
  shape.blocks = job.num_sms;
  shape.threads = static_cast<int>(warps) * kWarpLanes;
  shape.piece_bytes =
      static_cast<std::uint32_t>(layout::round_up((bytes + pieces - 1) / pieces, unit));
  const std::uint32_t fit = warp_bytes / shape.piece_bytes;
  const std::uint32_t slots = fit < kMaxSlots ? fit : kMaxSlots;
  shape.slots = static_cast<int>(slots);
  const std::uint32_t coming = slots / terms < kItems ? slots / terms : kItems;
  return {shape, std::uint64_t{warps} * coming * terms * bytes / pieces};
}

}  // namespace

CombineShape choose_combine_bulk_shape(const CombineJob& job) {
  // Four warps to each scheduler, unless larger slots of fewer warps have more in flight.
  constexpr std::uint32_t kFewerWarps = 14;
  const BulkShape all = shape_of_warps(job, kMaxWarps);
  const BulkShape fewer = shape_of_warps(job, kFewerWarps);
  return fewer.in_flight * 10 > all.in_flight * 11 ? fewer.shape : all.shape;
}

cudaError_t launch_combine_recv_bulk(const RankTable<CombineRecvArgs>& table, int ranks,
                                     const CombineShape& shape, cudaStream_t stream) {
  return with_element(table.rank[0].dtype, [&]<typename Element>() {
    return launch<Element>(table, ranks, shape, stream);
  });
}

cudaError_t prepare_combine_recv() {
  int device = 0;
  bool bulk = false;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = has_bulk_copies(device, bulk);
  if (error != cudaSuccess || !bulk) return error;
  for (const cudaError_t each :
       {allow_shared<Bf16Element>(), allow_shared<F16Element>(), allow_shared<F32Element>()}) {
    if (each != cudaSuccess) return each;
  }
  return cudaSuccess;
}

}  // namespace wherry::kernels::cuda
