// Stage 2, second half: from the counts of all ranks to the place of each row.
//   base[slot] = segment begin + rows of earlier ranks; row = base + rows of earlier tokens here.
#pragma once

#include "kernels/cuda/counting.cuh"

namespace wherry::kernels::cuda {

// Bits of the flags that a block's threads raise while they receive counts.
enum PlanFlag : unsigned { kFlagWait = 1, kFlagBad = 2, kFlagFull = 4, kFlagPlacement = 8 };

// Lanes that share a pair of the messages of all ranks: each takes every second source, and then one of
// the two words.
inline constexpr int kSourceLanes = 2;
inline constexpr int kPairsOfWarp = kWarpLanes / kSourceLanes;

// The sum over both lanes of the word that is this lane's.
__device__ inline std::uint64_t sum_over_sources(const WordPair& pair, int part) {
  const std::uint64_t other = part == 0 ? pair.second : pair.first;
  return (part == 0 ? pair.first : pair.second) + __shfl_xor_sync(kAllLanes, other, 1);
}
__device__ inline std::int32_t count_of_word(std::uint64_t word, int which) {
  return static_cast<std::int32_t>(word >> (which * kCountBits) &
                                   ((std::uint64_t{1} << kCountBits) - 1));
}

// One warp: kPairsOfWarp pairs of the messages of all ranks, each either the header or entries
// [4 * quad, 4 * quad + 4). With rows_per_slot the base is final; otherwise it lacks where the segment
// begins (scan_segments). Returns the lane's flags.
__device__ inline unsigned receive_pairs_of_warp(const CountArgs& args, const CountShared& shared,
                                                 const StageInfo& info, int first_pair, int pairs) {
  constexpr int kInFlight = 4;
  const RankContext& context = args.context;
  const int part = lane_index() % kSourceLanes;
  const int pair = first_pair + lane_index() / kSourceLanes;
  const int quad = pair - kHeaderPairs;
  const bool inside = pair < pairs && pair != 1;  // nobody needs the second pair of a good header
  const std::uint64_t stride = context.layout.counts_stride;
  const auto* message =
      own_window_at<std::byte>(context, context.layout.count_message(info.generation, 0)) +
      pair * sizeof(WordPair);
  const int my_entry = args.placement.slots + context.rank;  // token rows that come here
  WordPair earlier{0, 0};
  WordPair own{0, 0};
  WordPair all{0, 0};
  unsigned flags = 0;
#pragma unroll 1
  for (int source = part; inside && source < context.ranks; source += kSourceLanes * kInFlight) {
    WordPair words[kInFlight];
    const int count = min(kInFlight, (context.ranks - source + kSourceLanes - 1) / kSourceLanes);
    if (!receive_pairs(context, info, message + static_cast<std::uint64_t>(source) * stride,
                       kSourceLanes * stride, count, source, kSourceLanes, words)) {
      flags = kFlagWait;
      break;
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int from = source + i * kSourceLanes;
      if (from >= context.ranks) continue;
      const WordPair data = data_of(words[i]);
      if (from < context.rank) add_to(earlier, data);
      if (from == context.rank) own = data;
      add_to(all, data);
      if (quad < 0 && hash_of_header(data.second) != args.placement_hash) flags |= kFlagPlacement;
      if (my_entry / 4 != quad) continue;
      shared.from[from] = count_of_word(my_entry % 4 < 2 ? data.first : data.second, my_entry % 2);
    }
  }
  __syncwarp();
  const std::uint64_t totals = sum_over_sources(all, part);
  const std::uint64_t befores = sum_over_sources(earlier, part);
  const std::uint64_t mines = sum_over_sources(own, part);
  if (!inside) return flags;
  if (quad < 0) {  // only the status is in the upper half of the first word
    return flags | (part == 0 && totals >> 32 != 0 ? kFlagBad : 0U);
  }
  const auto token_rows = static_cast<std::int64_t>(context.layout.token_row_capacity);
#pragma unroll
  for (int which = 0; which < 2; ++which) {
    const int entry = 4 * quad + 2 * part + which;
    const int peer = entry - args.placement.slots;
    const std::int32_t total = count_of_word(totals, which);
    std::int32_t begin = 0;
    if (peer < 0 && args.rows_per_slot > 0) {
      begin = (entry - shared.slot_begin[shared.slot_rank[entry]]) * args.rows_per_slot;
      if (total > args.rows_per_slot && !args.drops) flags |= kFlagFull;
      shared.end[entry] = begin + args.rows_per_slot;
    }
    shared.base[entry] = begin + count_of_word(befores, which);
    shared.total[entry] = total;
    if (peer < 0 || peer >= context.ranks) continue;
    shared.to[peer] = count_of_word(mines, which);
    if (token_rows != 0 && total > token_rows) flags |= kFlagFull;
  }
  return flags;
}

// `warps` warps, this one number `warp`: waits for the counts of all ranks and fills base, total, end, to
// and from, but for what finish_counts() does. `flags` is shared memory, 0 before.
__device__ inline void receive_counts(const CountArgs& args, const CountShared& shared,
                                      const StageInfo& info, int warp, int warps, unsigned* flags) {
  const int pairs = kHeaderPairs + shared.entries / 4;
  unsigned raised = 0;
#pragma unroll 1
  for (int first = warp * kPairsOfWarp;
       first < pairs && !__any_sync(kAllLanes, (raised & kFlagWait) != 0);
       first += warps * kPairsOfWarp) {
    raised |= receive_pairs_of_warp(args, shared, info, first, pairs);
  }
  if (raised != 0) atomicOr(flags, raised);
}

// One warp: where the segments of one rank's slots begin, each a multiple of the alignment. Adds that
// to the base; for this rank, if it `writes`, also what the plan says of arrivals. Returns the rows
// of the rank, padding not counted.
__device__ inline std::int32_t scan_segments(const CountArgs& args, const CountShared& shared,
                                             int rank, bool writes, bool add) {
  const int lane = lane_index();
  const std::int32_t first_slot = shared.slot_begin[rank];
  const std::int32_t local_slots = shared.slot_begin[rank + 1] - first_slot;
  const bool mine = rank == args.context.rank && writes;
  std::int32_t carried = 0;
  std::int32_t carried_totals = 0;
  std::int32_t rows = 0;
#pragma unroll 1
  for (std::int32_t chunk = 0; chunk < local_slots; chunk += kWarpLanes) {
    const std::int32_t local = chunk + lane;
    const bool inside = local < local_slots;
    const std::int32_t total = inside ? shared.total[first_slot + local] : 0;
    std::int32_t kept = total;
    if (args.drops && args.rows_per_slot > 0) kept = min(total, args.rows_per_slot);
    if (args.drops && args.row_limit > 0) {
      const std::int32_t totals = sum_up_to_lane(total, lane);
      kept = max(0, min(total, args.row_limit - (carried_totals + totals - total)));
      carried_totals += __shfl_sync(kAllLanes, totals, kWarpLanes - 1);
    }
    std::int32_t room = inside ? args.rows_per_slot : 0;
    if (args.rows_per_slot == 0) {
      room = static_cast<std::int32_t>(layout::round_up(
          static_cast<std::uint64_t>(kept), static_cast<std::uint64_t>(args.alignment)));
    }
    const std::int32_t end = sum_up_to_lane(room, lane);
    const std::int32_t begin = carried + end - room;
    if (inside && add) {
      shared.base[first_slot + local] += begin;
      shared.end[first_slot + local] = begin + kept;
    }
    if (inside && mine) {
      args.plan.slot_counts[local] = kept;
      args.plan.slot_begin[local] = begin;
    }
    rows += kept;
    carried += __shfl_sync(kAllLanes, end, kWarpLanes - 1);
  }
  const auto received =
      static_cast<std::int32_t>(__reduce_add_sync(kAllLanes, static_cast<unsigned>(rows)));
  if (mine && lane == 0) {
    args.plan.slot_begin[local_slots] = carried;
    args.plan.totals[kRowsReceived] = received;
  }
  return received;
}

// One thread: what is wrong with this plan, for its owner and for whoever asks the exchange.
__device__ __noinline__ inline void report_plan(const CountArgs& args, const CountShared& shared,
                                                const StageInfo& info, std::int32_t status,
                                                std::uint32_t serial) {
  const RankContext& context = args.context;
  PlanReport report{0, 0, status, -1, -1, -1, -1, 0};
  for (int peer = 0; peer < context.ranks && status != kPlanOverflow && report.peer < 0; ++peer) {
    const auto* message = own_window_at<WordPair>(
        context, context.layout.count_message(info.generation, static_cast<std::uint64_t>(peer)));
    const WordPair first = data_of(load_pair_system(message));
    WordPair second = load_pair_system(message + 1);
    if (status == kPlanOtherPlacement) {
      if (hash_of_header(first.second) != args.placement_hash) report.peer = peer;
      continue;
    }
    if (first.first >> 32 == 0) continue;
    // This pair is not among those that all have waited for.
    Patience patience;
    while (!holds_epoch(second, info.epoch) && patience.lasts(context, info, peer)) {
      second = load_pair_system(message + 1);
    }
    const WordPair id = data_of(second);
    report.peer = peer;
    report.status = static_cast<std::int32_t>(first.first >> 32);
    report.token = static_cast<std::int32_t>(first.first);
    report.choice = static_cast<std::int32_t>(first.second & ((1U << kChoiceBits) - 1));
    report.id = static_cast<std::int64_t>(id.first | (id.second << kWordDataBits));
  }
  const auto most_token_rows = static_cast<std::int64_t>(context.layout.token_row_capacity);
  for (int peer = 0; peer < context.ranks && status == kPlanOverflow && report.peer < 0; ++peer) {
    std::int64_t rows = 0;
    for (int slot = shared.slot_begin[peer]; slot < shared.slot_begin[peer + 1]; ++slot) {
      const std::int32_t total = shared.total[slot];
      if (args.rows_per_slot > 0 && total > args.rows_per_slot && report.peer < 0) {
        report.peer = peer;
        report.slot = slot;
        report.rows = total;
      }
      rows += total;
    }
    const std::int64_t token_rows = shared.total[args.placement.slots + peer];
    if (args.row_limit > 0 && rows > args.row_limit) {
      report.peer = peer;
      report.rows = rows;
    } else if (most_token_rows != 0 && token_rows > most_token_rows) {
      report.peer = peer;
      report.rows = token_rows;
    }
  }
  report.serial = serial;
  if (args.plan.report != nullptr) *args.plan.report = report;
  if (args.report == nullptr) return;
  auto* known = reinterpret_cast<volatile std::uint32_t*>(&args.report->serial);
  if (*known != 0) return;  // the host has not seen the one before
  report.serial = 0;
  *args.report = report;
  fence_system();
  *known = serial;
}

// One block, its threads from `first` on: what arrived, for Exchange::loads().
__device__ inline void add_loads(const CountArgs& args, const CountShared& shared, int first) {
  const int thread = static_cast<int>(threadIdx.x) - first;
  if (args.loads == nullptr || thread < 0) return;
#pragma unroll 1
  for (int slot = thread; slot < args.placement.slots;
       slot += static_cast<int>(blockDim.x) - first) {
    args.loads[slot] += shared.total[slot];
  }
}

// A poisoned plan: nothing travels.
__device__ inline void clear_plan(const CountArgs& args, const CountShared& shared, bool writes,
                                  std::int32_t status, std::uint32_t begin, std::uint32_t end) {
  const auto topk = static_cast<std::uint32_t>(args.context.topk);
#pragma unroll 1
  for (std::uint32_t at = begin * topk + threadIdx.x; at < end * topk; at += blockDim.x) {
    args.plan.dest[at] = -1;
    args.plan.slot[at] = -1;
    args.plan.row[at] = -1;
    args.plan.token_row[at] = -1;
  }
#pragma unroll 1
  for (int peer = static_cast<int>(threadIdx.x); peer < args.context.ranks;
       peer += static_cast<int>(blockDim.x)) {
    shared.to[peer] = 0;
    shared.from[peer] = 0;
    if (!writes) continue;
    args.plan.token_rows_from[peer] = 0;
    args.plan.token_rows_to[peer] = 0;
    args.plan.token_row_begin[peer] = 0;
  }
  if (!writes) return;
  const int rank = args.context.rank;
  const int local_slots = args.placement.slot_begin[rank + 1] - args.placement.slot_begin[rank];
#pragma unroll 1
  for (int slot = static_cast<int>(threadIdx.x); slot <= local_slots;
       slot += static_cast<int>(blockDim.x)) {
    if (slot < local_slots) args.plan.slot_counts[slot] = 0;
    args.plan.slot_begin[slot] = 0;
  }
  if (threadIdx.x == 0) {
    args.plan.totals[kRowsReceived] = 0;
    args.plan.totals[kTokenRowsReceived] = 0;
    args.plan.totals[kPlanStatus] = status;
  }
}

enum class Placed { failed, poisoned, good };

// One block, all threads, when the counts are received: what they mean. Only the block that `writes` tells
// the plan (the exchange's number `serial`); with rows_per_slot it does so later (write_arrivals), since
// nothing waits for it. Tokens [begin, end) are the block's.
__device__ inline Placed finish_counts(const CountArgs& args, const CountShared& shared,
                                       const StageInfo& info, std::uint32_t serial, bool writes,
                                       unsigned* flags, std::uint32_t begin, std::uint32_t end) {
  __syncthreads();
  if (args.rows_per_slot == 0 && (*flags & kFlagWait) == 0) {
    for (int rank = warp_index(); rank < args.context.ranks;
         rank += static_cast<int>(blockDim.x) / kWarpLanes) {
      const std::int32_t rows = scan_segments(args, shared, rank, writes, true);
      if (args.row_limit > 0 && rows > args.row_limit && lane_index() == 0) {
        atomicOr(flags, kFlagFull);
      }
    }
    __syncthreads();
  }
  const unsigned raised = *flags;
  if ((raised & kFlagWait) != 0) return Placed::failed;
  if (raised == 0) return Placed::good;
  const PlanStatus status = (raised & kFlagBad) != 0         ? kPlanBadExpert
                            : (raised & kFlagPlacement) != 0 ? kPlanOtherPlacement
                                                             : kPlanOverflow;
  if (writes && threadIdx.x == 0) report_plan(args, shared, info, status, serial);
  __syncthreads();
  clear_plan(args, shared, writes, status, begin, end);
  __syncthreads();
  return Placed::poisoned;
}

// One warp: what the plan says of arrivals.
__device__ inline void write_arrivals(const CountArgs& args, const CountShared& shared) {
  if (args.rows_per_slot > 0) scan_segments(args, shared, args.context.rank, true, false);
  const int lane = lane_index();
#pragma unroll 1
  for (int peer = lane; peer < args.context.ranks; peer += kWarpLanes) {
    args.plan.token_rows_from[peer] = shared.from[peer];
    args.plan.token_rows_to[peer] = shared.to[peer];
    args.plan.token_row_begin[peer] = shared.base[args.placement.slots + peer];
  }
  if (lane == 0) {
    if (args.plan.report != nullptr) args.plan.report->serial = 0;
    args.plan.totals[kTokenRowsReceived] = shared.total[args.placement.slots + args.context.rank];
    args.plan.totals[kPlanStatus] = kPlanGood;
  }
}

}  // namespace wherry::kernels::cuda
