// Stage 2, plan: counts every rank's rows, tells them to all ranks, and places each row.
//
// Order is part of the contract: by slot, source rank, token, k. So counting is stable: a block
// counts a run of tokens, each of its warps a run of those, one token at a time.
//   count_send  within[choice] = rows before it in its warp's run -> in its block's run;
//               the last block: prefix sums over blocks, totals to every peer, signals.
//   count_recv  base[slot] = segment begin + rows of earlier ranks;
//               row = base + rows of earlier blocks + within.
// A token counts once for each slot and once for each rank it goes to. Entries [0, slots) are
// slots, [slots, slots + ranks) are ranks, as in a count message.
#include "kernels/cuda/choices.cuh"
#include "kernels/cuda/launch.hpp"
#include "kernels/cuda/signals.cuh"

namespace wherry::kernels::cuda {

namespace {

constexpr int kThreads = 512;
constexpr int kMaxCountShared = 200 * 1024;
constexpr int kTokensInFlight = 4;
constexpr int kLoadsInFlight = 16;

__device__ std::size_t choice_at(std::uint32_t token, int topk, int lane) {
  return static_cast<std::size_t>(token) * static_cast<std::size_t>(topk) +
         static_cast<std::size_t>(lane);
}

__device__ std::int64_t load_id(const CountArgs& args, std::size_t at) {
  return args.ids_are_int64 ? static_cast<const std::int64_t*>(args.ids)[at]
                            : std::int64_t{static_cast<const std::int32_t*>(args.ids)[at]};
}

// The replica that serves (token, source rank), as Placement::slot_for.
__device__ std::int32_t slot_for(const CountArgs& args, std::int64_t expert, std::uint32_t token) {
  const std::int32_t begin = args.placement.expert_begin[expert];
  const std::int32_t replicas = args.placement.expert_begin[expert + 1] - begin;
  if (replicas == 1) return args.placement.expert_slots[begin];
  const std::uint64_t turn = std::uint64_t{token} + static_cast<std::uint64_t>(args.context.rank);
  const auto pick = static_cast<std::int32_t>(turn % static_cast<std::uint64_t>(replicas));
  return args.placement.expert_slots[begin + pick];
}

// One warp, one token: writes the plan's entries but for the offsets that only others know.
__device__ void count_token(const CountArgs& args, std::uint32_t token, std::int64_t id, int lane,
                            std::int32_t* counts) {
  const bool exists = lane < args.context.topk;
  const std::size_t at = choice_at(token, args.context.topk, lane);
  std::int32_t slot = -1;
  std::int32_t dest = -1;
  if (exists && id >= 0 && id < args.placement.experts) {
    slot = slot_for(args, id, token);
    dest = args.placement.slot_rank[slot];
  } else if (exists && id != -1) {
    atomicMin(reinterpret_cast<unsigned long long*>(args.bad_choice),
              static_cast<unsigned long long>(at));
  }
  const bool first_of_slot = is_first_with(slot, lane);
  const bool first_of_rank = is_first_with(dest, lane);
  std::int32_t within_slot = -1;
  std::int32_t within_rank = -1;
  std::int32_t* slot_count = counts + slot;
  std::int32_t* rank_count = counts + args.placement.slots + dest;
  if (slot >= 0) {
    within_slot = *slot_count;
    within_rank = *rank_count;
  }
  __syncwarp();
  if (first_of_slot) *slot_count = within_slot + 1;
  if (first_of_rank) *rank_count = within_rank + 1;
  __syncwarp();
  if (!exists) return;
  args.plan.slot[at] = slot;
  args.plan.dest[at] = dest;
  args.plan.row[at] = within_slot;
  args.plan.token_row[at] = within_rank;
  args.plan.repeat[at] = slot >= 0 && !first_of_slot ? 1 : 0;
  args.plan.weight[at] = args.weights != nullptr ? args.weights[at] : 1.0F;
}

// Blocks that count any tokens at all.
__device__ int num_counting_blocks(const CountArgs& args) {
  return min((args.plan.tokens + args.chunk_tokens - 1) / args.chunk_tokens,
             static_cast<int>(gridDim.x));
}

// One block: its warps' counts become each warp's offset within the block; the block's
// totals go to block_counts.
__device__ void sum_over_warps(const CountArgs& args, std::int32_t* counts, int entries,
                               int warps) {
  for (int entry = static_cast<int>(threadIdx.x); entry < entries;
       entry += static_cast<int>(blockDim.x)) {
    std::int32_t before = 0;
    for (int warp = 0; warp < warps; ++warp) {
      const std::int32_t mine = counts[warp * entries + entry];
      counts[warp * entries + entry] = before;
      before += mine;
    }
    args.block_counts[static_cast<int>(blockIdx.x) * entries + entry] = before;
  }
}

// The last block: offsets of each block, totals to every peer.
__device__ void tell_peers(const CountArgs& args, int entries, std::uint32_t plans) {
  const RankContext& context = args.context;
  const std::uint32_t generation = plans % layout::kCountGenerations;
  const std::uint64_t message =
      context.layout.count_message(generation, static_cast<std::uint64_t>(context.rank));
  const int blocks = num_counting_blocks(args);
  for (int entry = static_cast<int>(threadIdx.x); entry < entries;
       entry += static_cast<int>(blockDim.x)) {
    std::int32_t before = 0;
    for (int base = 0; base < blocks; base += kLoadsInFlight) {
      std::int32_t mine[kLoadsInFlight];  // all loads before the stores: one latency, not `blocks`
#pragma unroll
      for (int i = 0; i < kLoadsInFlight; ++i) {
        mine[i] = base + i < blocks ? args.block_counts[(base + i) * entries + entry] : 0;
      }
#pragma unroll
      for (int i = 0; i < kLoadsInFlight; ++i) {
        if (base + i < blocks) args.block_counts[(base + i) * entries + entry] = before;
        before += mine[i];
      }
    }
    for (int peer = 0; peer < context.ranks; ++peer) {
      window_at<std::int32_t>(context, peer, message + layout::kCountHeaderBytes)[entry] = before;
    }
  }
  for (int peer = static_cast<int>(threadIdx.x); peer < context.ranks;
       peer += static_cast<int>(blockDim.x)) {
    layout::CountHeader header{kPlanGood, 0, 0, args.plan.tokens, 0};
    const std::uint64_t bad = *args.bad_choice;
    if (bad != kNoBadChoice) {
      header.status = kPlanBadExpert;
      header.token = static_cast<std::int32_t>(bad / static_cast<std::uint64_t>(context.topk));
      header.choice = static_cast<std::int32_t>(bad % static_cast<std::uint64_t>(context.topk));
      header.id = load_id(args, bad);
    }
    *window_at<layout::CountHeader>(context, peer, message) = header;
  }
  __syncthreads();
  if (threadIdx.x == 0) *args.bad_choice = kNoBadChoice;
  signal_peers(context, layout::Channel::counts, generation, plans / layout::kCountGenerations + 1,
               [&](int) { return 0U; });
}

__device__ void count_chunk(const CountArgs& args, std::int32_t* counts, int counting_warps) {
  const int entries = args.placement.slots + args.context.ranks;
  const int lane = lane_index();
  const int warp = warp_index();
  const auto tokens = static_cast<std::uint32_t>(args.plan.tokens);
  const auto chunk = static_cast<std::uint32_t>(args.chunk_tokens);
  const std::uint32_t run = (chunk + static_cast<std::uint32_t>(counting_warps) - 1) /
                            static_cast<std::uint32_t>(counting_warps);
  const int used_warps = static_cast<int>((chunk + run - 1) / run);
  for (int at = static_cast<int>(threadIdx.x); at < used_warps * entries;
       at += static_cast<int>(blockDim.x)) {
    counts[at] = 0;
  }
  __syncthreads();

  const std::uint32_t chunk_begin = min(blockIdx.x * chunk, tokens);
  const std::uint32_t chunk_end = min(chunk_begin + chunk, tokens);
  const std::uint32_t begin = min(chunk_begin + static_cast<std::uint32_t>(warp) * run, chunk_end);
  const std::uint32_t end = warp < used_warps ? min(begin + run, chunk_end) : begin;
  const int topk = args.context.topk;
  std::int32_t* my_counts = counts + warp * entries;
  for (std::uint32_t base = begin; base < end; base += kTokensInFlight) {
    std::int64_t ids[kTokensInFlight];
#pragma unroll
    for (std::uint32_t i = 0; i < kTokensInFlight; ++i) {
      const bool inside = base + i < end && lane < topk;
      ids[i] = inside ? load_id(args, choice_at(base + i, topk, lane)) : -1;
    }
#pragma unroll
    for (std::uint32_t i = 0; i < kTokensInFlight; ++i) {
      if (base + i < end) count_token(args, base + i, ids[i], lane, my_counts);
    }
  }
  __syncthreads();
  sum_over_warps(args, counts, entries, used_warps);
  __syncthreads();
  for (std::uint32_t token = begin; token < end; ++token) {
    if (lane >= topk) continue;
    const std::size_t at = choice_at(token, topk, lane);  // this lane wrote it above
    if (args.plan.dest[at] < 0) continue;
    args.plan.row[at] += my_counts[args.plan.slot[at]];
    args.plan.token_row[at] += my_counts[args.placement.slots + args.plan.dest[at]];
  }
}

__device__ void send_counts(const CountArgs& args, std::uint32_t plans, std::int32_t* counts,
                            int counting_warps) {
  if (static_cast<int>(blockIdx.x) < num_counting_blocks(args)) {
    count_chunk(args, counts, counting_warps);
  }
  if (is_last_block(*args.context.state, Arrival::counted)) {
    tell_peers(args, args.placement.slots + args.context.ranks, plans);
  }
}

// --- Placing ------------------------------------------------------------------------------------

// The counts of all ranks, as they lie in this rank's window.
struct CountTable {
  const std::byte* entries;  // of rank 0
  std::uint64_t stride;
  __device__ std::int32_t operator()(int rank, int entry) const {
    return reinterpret_cast<const std::int32_t*>(entries +
                                                 static_cast<std::uint64_t>(rank) * stride)[entry];
  }
};

// One warp: the segments of one rank's slots. For each slot: base[slot] = where my rows begin; for
// my own rank also what arrives. Returns the rows of the rank with padding.
__device__ std::int32_t place_slots(const CountArgs& args, const CountTable& counts, int rank,
                                    bool write, std::int32_t* base, int lane, bool* overflow) {
  const RankContext& context = args.context;
  const std::int32_t first_slot = args.placement.slot_begin[rank];
  const std::int32_t local_slots = args.placement.slot_begin[rank + 1] - first_slot;
  const bool mine = rank == context.rank && write;
  std::int32_t carried = 0;
  std::int32_t rows = 0;
  for (std::int32_t chunk = 0; chunk < local_slots; chunk += kWarpLanes) {
    const std::int32_t local = chunk + lane;
    std::int32_t before = 0;
    std::int32_t total = 0;
    if (local < local_slots) {
#pragma unroll 8
      for (int source = 0; source < context.ranks; ++source) {
        const std::int32_t count = counts(source, first_slot + local);
        if (source < context.rank) before += count;
        total += count;
      }
    }
    const bool fixed = args.rows_per_slot > 0;
    const std::int32_t room =
        local >= local_slots ? 0
        : fixed
            ? args.rows_per_slot
            : static_cast<std::int32_t>(layout::round_up(
                  static_cast<std::uint64_t>(total), static_cast<std::uint64_t>(args.alignment)));
    if (fixed && total > room) *overflow = true;
    std::int32_t end = room;  // inclusive prefix sum over the lanes
#pragma unroll
    for (int distance = 1; distance < kWarpLanes; distance *= 2) {
      const std::int32_t other = __shfl_up_sync(kAllLanes, end, distance);
      if (lane >= distance) end += other;
    }
    const std::int32_t begin = carried + end - room;
    if (local < local_slots) {
      base[first_slot + local] = begin + before;
      if (mine) {
        args.plan.slot_counts[local] = total;
        args.plan.slot_begin[local] = begin;
      }
      rows += total;
    }
    carried += __shfl_sync(kAllLanes, end, kWarpLanes - 1);
  }
  if (mine) {
    const auto received =
        static_cast<std::int32_t>(__reduce_add_sync(kAllLanes, static_cast<unsigned>(rows)));
    if (lane == 0) {
      args.plan.slot_begin[local_slots] = carried;
      args.plan.totals[kRowsReceived] = received;
    }
  }
  return carried;
}

// One thread for each rank: token rows of earlier sources there, and what comes from and goes to it.
__device__ std::int32_t place_token_rows(const CountArgs& args, const CountTable& counts, int rank,
                                         bool write, std::int32_t* base) {
  const RankContext& context = args.context;
  const int slots = args.placement.slots;
  std::int32_t before = 0;
  std::int32_t total = 0;
#pragma unroll 8
  for (int source = 0; source < context.ranks; ++source) {
    const std::int32_t count = counts(source, slots + rank);
    if (source < context.rank) before += count;
    total += count;
  }
  base[slots + rank] = before;
  if (write) {
    args.plan.token_rows_from[rank] = counts(rank, slots + context.rank);
    args.plan.token_rows_to[rank] = counts(context.rank, slots + rank);
    if (rank == context.rank) args.plan.totals[kTokenRowsReceived] = total;
  }
  return total;
}

__device__ void clear_plan(const CountArgs& args, std::int32_t status) {
  const int threads = static_cast<int>(gridDim.x * blockDim.x);
  const int thread = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  const int choices = args.plan.tokens * args.context.topk;
  for (int at = thread; at < choices; at += threads) {
    args.plan.dest[at] = -1;
    args.plan.row[at] = -1;
    args.plan.token_row[at] = -1;
  }
  if (blockIdx.x != 0) return;
  const std::int32_t local_slots = args.placement.slot_begin[args.context.rank + 1] -
                                   args.placement.slot_begin[args.context.rank];
  for (int at = static_cast<int>(threadIdx.x); at <= local_slots;
       at += static_cast<int>(blockDim.x)) {
    if (at < local_slots) args.plan.slot_counts[at] = 0;
    args.plan.slot_begin[at] = at * args.rows_per_slot;
  }
  for (int peer = static_cast<int>(threadIdx.x); peer < args.context.ranks;
       peer += static_cast<int>(blockDim.x)) {
    args.plan.token_rows_from[peer] = 0;
    args.plan.token_rows_to[peer] = 0;
  }
  if (threadIdx.x == 0) {
    args.plan.totals[kRowsReceived] = 0;
    args.plan.totals[kTokenRowsReceived] = 0;
    args.plan.totals[kPlanStatus] = status;
  }
}

// `base` holds slots + ranks entries. False if a wait failed.
__device__ bool receive_counts(const CountArgs& args, std::uint32_t plans, std::int32_t* base) {
  const RankContext& context = args.context;
  const std::uint32_t generation = plans % layout::kCountGenerations;
  const StageInfo info{Stage::plan, layout::Channel::counts, generation,
                       plans / layout::kCountGenerations + 1};
  if (!wait_for_peers(context, info, [](int) { return std::int64_t{-1}; })) return false;

  const CountTable counts{
      window_at<std::byte>(context, context.rank,
                           context.layout.count_message(generation, 0) + layout::kCountHeaderBytes),
      context.layout.counts_stride};
  const bool write = blockIdx.x == 0;
  const int lane = lane_index();
  const int warps = static_cast<int>(blockDim.x) / kWarpLanes;
  std::int32_t status = kPlanGood;
  bool overflow = false;
  for (int rank = static_cast<int>(threadIdx.x); rank < context.ranks;
       rank += static_cast<int>(blockDim.x)) {
    const auto* header = window_at<layout::CountHeader>(
        context, context.rank,
        context.layout.count_message(generation, static_cast<std::uint64_t>(rank)));
    if (header->status != kPlanGood) status = header->status;
    const auto token_rows = place_token_rows(args, counts, rank, write, base);
    const std::uint64_t capacity = context.layout.token_row_capacity;
    if (capacity != 0 && static_cast<std::uint64_t>(token_rows) > capacity) overflow = true;
  }
  for (int rank = warp_index(); rank < context.ranks; rank += warps) {
    const auto rows = place_slots(args, counts, rank, write, base, lane, &overflow);
    if (args.row_limit > 0 && rows > args.row_limit) overflow = true;
  }
  const int bad = __syncthreads_or(status != kPlanGood ? 1 : 0);
  const int full = __syncthreads_or(overflow ? 1 : 0);
  if (bad != 0 || full != 0) {
    clear_plan(args, bad != 0 ? kPlanBadExpert : kPlanOverflow);
    return true;
  }
  if (write && threadIdx.x == 0) args.plan.totals[kPlanStatus] = kPlanGood;

  const int entries = args.placement.slots + context.ranks;
  const auto topk = static_cast<std::uint32_t>(context.topk);
  const std::uint32_t choices = static_cast<std::uint32_t>(args.plan.tokens) * topk;
  for (std::uint32_t at = blockIdx.x * blockDim.x + threadIdx.x; at < choices;
       at += gridDim.x * blockDim.x) {
    const std::int32_t dest = args.plan.dest[at];
    if (dest < 0) continue;
    const std::int32_t slot = args.plan.slot[at];
    const auto block = static_cast<int>(at / topk) / args.chunk_tokens;
    const std::int32_t* before = args.block_counts + block * entries;
    args.plan.row[at] += base[slot] + before[slot];
    args.plan.token_row[at] +=
        base[args.placement.slots + dest] + before[args.placement.slots + dest];
  }
  return true;
}

template <CountStep kStep>
__global__ void __launch_bounds__(kThreads)
    count(const __grid_constant__ RankTable<CountArgs> table, int counting_warps) {
  extern __shared__ std::int32_t counts[];
  const CountArgs& args = table.rank[blockIdx.y];
  RankState& state = *args.context.state;
  const StageBegin begin = begin_stage(args.context, state.plans);
  if (begin.failed) return;
  const std::uint32_t plans = begin.epoch - 1;
  if constexpr (kStep != CountStep::recv) send_counts(args, plans, counts, counting_warps);
  if constexpr (kStep != CountStep::send) {
    // In one launch this rank's own signal also says that its last block has summed over blocks.
    if (!receive_counts(args, plans, counts)) return;
    if (threadIdx.x == 0 && is_last_to_leave(state, Arrival::planned)) state.plans = plans + 1;
  }
}

template <CountStep kStep>
cudaError_t launch(const RankTable<CountArgs>& table, int ranks, int blocks, cudaStream_t stream) {
  const CountArgs& args = table.rank[0];
  const int entries = args.placement.slots + args.context.ranks;
  const int entry_bytes = entries * static_cast<int>(sizeof(std::int32_t));
  int warps = kMaxCountShared / entry_bytes;
  if (warps > kThreads / kWarpLanes) warps = kThreads / kWarpLanes;
  if (warps < 1) return cudaErrorInvalidConfiguration;
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(ranks));
  count<kStep>
      <<<grid, kThreads, static_cast<std::size_t>(warps * entry_bytes), stream>>>(table, warps);
  return cudaGetLastError();
}

}  // namespace

std::size_t count_workspace_entries(int blocks, int slots, int ranks) {
  return static_cast<std::size_t>(blocks) * static_cast<std::size_t>(slots + ranks);
}

cudaError_t launch_count(const RankTable<CountArgs>& table, int ranks, int blocks, CountStep step,
                         cudaStream_t stream) {
  switch (step) {
    case CountStep::send: return launch<CountStep::send>(table, ranks, blocks, stream);
    case CountStep::recv: return launch<CountStep::recv>(table, ranks, blocks, stream);
    case CountStep::both: return launch<CountStep::both>(table, ranks, blocks, stream);
  }
  return cudaErrorInvalidValue;
}

cudaError_t prepare_count() {
  for (const cudaError_t each :
       {cudaFuncSetAttribute(count<CountStep::send>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             kMaxCountShared),
        cudaFuncSetAttribute(count<CountStep::recv>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             kMaxCountShared),
        cudaFuncSetAttribute(count<CountStep::both>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             kMaxCountShared)}) {
    if (each != cudaSuccess) return each;
  }
  return cudaSuccess;
}

}  // namespace wherry::kernels::cuda
