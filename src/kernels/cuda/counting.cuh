// Stage 2, first half: a block counts a run of tokens, and a rank's counts go to all ranks.
//
// Order is part of the contract: by slot, source rank, token, k. So counting is stable: a block takes
// a run of tokens, each of its warps a run of those, 32 choices at a time. A token counts once for
// each slot and once for each rank it goes to. Entries [0, slots) are slots, [slots, slots + ranks)
// are ranks, as in a count message; they are kept and sent in quads of four.
//
// A message is the region of layout.hpp with other contents: its 32 bytes of header and its entries
// are pairs of words that carry their epoch (signals.cuh). Header: word 0 is the token with a bad
// choice and, above 32 bits, the PlanStatus; word 1 the choice and, above 8 bits, the hash of the
// placement; words 2 and 3 the id. Entries: two counts of 24 bits a word, so a pair is a quad, in just the 16 bytes that four int32 would take.
#pragma once

#include <cstdint>

#include "kernels/cuda/choices.cuh"
#include "kernels/cuda/signals.cuh"

namespace wherry::kernels::cuda {

inline constexpr int kCountThreads = 512;  // 1024 would leave 64 registers, and spill
inline constexpr int kCountWarps = kCountThreads / kWarpLanes;
inline constexpr int kHeaderPairs = 2;
inline constexpr int kCountBits =
    24;  // tokens of all ranks in one plan: sums are made of whole words
static_assert(kHeaderPairs * sizeof(WordPair) == layout::kCountHeaderBytes);

__host__ __device__ constexpr int count_quads(int slots, int ranks) {
  return (slots + ranks + 3) / 4;
}

// --- Shared memory ------------------------------------------------------------------------------

// Where the choices of a run are kept, at token * topk + k: the arrays of the plan, or shared memory.
struct ChoiceArrays {
  std::int32_t* slot;
  std::int32_t* dest;
  std::int32_t* row;
  std::int32_t* token_row;
};

// What a block keeps in shared memory while it plans. Entry arrays have 4 * quads elements.
struct CountShared {
  std::int32_t* expert_begin;  // the placement: a lookup costs a trip to the cache otherwise
  std::int32_t* expert_slots;
  std::int32_t* slot_rank;
  std::int32_t* slot_begin;
  std::int32_t* base;    // [entries] where this rank's rows begin
  std::int32_t* total;   // [entries] of all ranks
  std::int32_t* end;     // [entries] rows from here on find no place (CountArgs::drops)
  std::int32_t* to;      // [ranks] token rows that this rank sends
  std::int32_t* from;    // [ranks] and receives
  std::int32_t* counts;  // [warps][entries]
  int entries;           // a multiple of 4
};
struct CountSizes {
  int experts, slots, ranks;
  __host__ __device__ constexpr int entries() const { return 4 * count_quads(slots, ranks); }
  // int32 before `counts`.
  __host__ __device__ constexpr int fixed() const {
    return (experts + 1 + 2 * slots + ranks + 1 + 2 * ranks + 3) / 4 * 4 + 3 * entries();
  }
};
__device__ inline CountShared count_shared(std::int32_t* memory, const CountArgs& args) {
  const CountSizes sizes{args.placement.experts, args.placement.slots, args.context.ranks};
  CountShared shared{};
  shared.entries = sizes.entries();
  shared.base = memory;
  shared.total = shared.base + shared.entries;
  shared.end = shared.total + shared.entries;
  shared.to = shared.end + shared.entries;
  shared.from = shared.to + sizes.ranks;
  shared.expert_begin = shared.from + sizes.ranks;
  shared.expert_slots = shared.expert_begin + sizes.experts + 1;
  shared.slot_rank = shared.expert_slots + sizes.slots;
  shared.slot_begin = shared.slot_rank + sizes.slots;
  shared.counts = memory + sizes.fixed();
  return shared;
}

// A thread's part of the placement: loaded first, stored when something else is on its way too.
struct PlacementPart {
  std::int32_t expert_begin, expert_slot, slot_rank, slot_begin;
};
__device__ inline int num_placement_parts(const CountArgs& args) {
  return max(max(args.placement.experts + 1, args.placement.slots), args.context.ranks + 1);
}
__device__ inline PlacementPart load_placement_part(const CountArgs& args, int part) {
  const PlacementArrays& placement = args.placement;
  return {part <= placement.experts ? placement.expert_begin[part] : 0,
          part < placement.slots ? placement.expert_slots[part] : 0,
          part < placement.slots ? placement.slot_rank[part] : 0,
          part <= args.context.ranks ? placement.slot_begin[part] : 0};
}
__device__ inline void store_placement_part(const CountArgs& args, const CountShared& shared,
                                            int part, const PlacementPart& loaded) {
  if (part <= args.placement.experts) shared.expert_begin[part] = loaded.expert_begin;
  if (part < args.placement.slots) {
    shared.expert_slots[part] = loaded.expert_slot;
    shared.slot_rank[part] = loaded.slot_rank;
  }
  if (part <= args.context.ranks) shared.slot_begin[part] = loaded.slot_begin;
}
// One block: stores `first`, the thread's own part, and does the rest.
__device__ inline void store_placement(const CountArgs& args, const CountShared& shared,
                                       PlacementPart first) {
  const int parts = num_placement_parts(args);
#pragma unroll 1
  for (int part = static_cast<int>(threadIdx.x); part < parts;) {
    store_placement_part(args, shared, part, first);
    part += static_cast<int>(blockDim.x);
    if (part < parts) first = load_placement_part(args, part);
  }
}

// --- Counting -----------------------------------------------------------------------------------

// Tokens [begin, end) of a block, dealt to its warps in runs of whole steps.
struct Run {
  std::uint32_t begin, end;  // of this warp
  std::uint32_t each;        // tokens of a warp
  int used_warps;            // of the block
};
__device__ inline int tokens_per_step(int topk) { return kWarpLanes / topk; }
__device__ inline Run run_of_warp(std::uint32_t begin, std::uint32_t end, int topk, int max_warps) {
  const auto step = static_cast<std::uint32_t>(tokens_per_step(topk));
  const auto warps = static_cast<std::uint32_t>(max_warps);
  const std::uint32_t each = ((end - begin + warps - 1) / warps + step - 1) / step * step;
  const std::uint32_t first = min(begin + static_cast<std::uint32_t>(warp_index()) * each, end);
  const std::uint32_t used = each == 0 ? 0 : (end - begin + each - 1) / each;
  return {first, min(first + each, end), each, static_cast<int>(used)};
}

__device__ inline std::int64_t load_id(const CountArgs& args, std::size_t at) {
  return args.ids_are_int64 ? static_cast<const std::int64_t*>(args.ids)[at]
                            : std::int64_t{static_cast<const std::int32_t*>(args.ids)[at]};
}

// The choice that this lane has in the step of `token`: lanes lie as the choices in memory.
struct StepLane {
  std::size_t at;
  std::uint32_t token;
  bool exists;
};
__device__ inline StepLane lane_of_step(std::uint32_t first_token, std::uint32_t end, int topk,
                                        int lane) {
  const std::uint32_t token = first_token + static_cast<std::uint32_t>(lane / topk);
  return {static_cast<std::size_t>(first_token) * static_cast<std::size_t>(topk) +
              static_cast<std::size_t>(lane),
          token, lane < tokens_per_step(topk) * topk && token < end};
}
__device__ inline std::int64_t load_step_id(const CountArgs& args, std::uint32_t first_token,
                                            std::uint32_t end, int lane) {
  const StepLane mine = lane_of_step(first_token, end, args.context.topk, lane);
  return mine.exists ? load_id(args, mine.at) : -1;
}

// The replica that serves (token, source rank), as Placement::slot_for.
__device__ inline std::int32_t slot_for(const CountArgs& args, const CountShared& shared,
                                        std::int64_t expert, std::uint32_t token) {
  const std::int32_t begin = shared.expert_begin[expert];
  const std::int32_t replicas = shared.expert_begin[expert + 1] - begin;
  if (replicas == 1) return shared.expert_slots[begin];
  const std::uint32_t turn = token + static_cast<std::uint32_t>(args.context.rank);  // few bits
  const std::uint32_t pick = turn % static_cast<std::uint32_t>(replicas);
  return shared.expert_slots[begin + static_cast<std::int32_t>(pick)];
}

// Counts one kind of entry for the lanes of a step: how many tokens before this lane's have `entry`,
// of those this warp has counted. `first`: no earlier lane of the token has it.
struct Counted {
  std::int32_t before;
  bool first;
};
__device__ inline Counted count_entries(std::int32_t entry, unsigned group, int lane,
                                        std::int32_t* counts) {
  const unsigned same = __match_any_sync(kAllLanes, entry);
  const unsigned before_token = (group & (0U - group)) - 1U;
  const bool first = entry >= 0 && (same & group & lanes_before(lane)) == 0;
  const unsigned tokens = same & __ballot_sync(kAllLanes, first);
  std::int32_t before = -1;
  if (entry >= 0) before = counts[entry] + __popc(tokens & before_token);
  __syncwarp();
  // Of the tokens of this step that have the entry, the last writes the count.
  if (first && (tokens >> lane) == 1U) counts[entry] = before + 1;
  return {before, first};
}

// One warp, one step. Writes the choices but for the offsets that only others know; `repeat` tells
// whether an earlier choice of the token has the slot. Returns the first bad choice of the lanes.
__device__ inline bool count_step(const CountArgs& args, const CountShared& shared,
                                  const StepLane& mine, std::int64_t id, std::int32_t* counts,
                                  const ChoiceArrays& choices, std::uint8_t* repeat) {
  const int lane = lane_index();
  const int topk = args.context.topk;
  const unsigned group = (kAllLanes >> (kWarpLanes - topk)) << (lane / topk * topk);
  std::int32_t slot = -1;
  std::int32_t dest = -1;
  const bool valid = id >= 0 && id < args.placement.experts;
  if (mine.exists && valid) {
    slot = slot_for(args, shared, id, mine.token);
    dest = shared.slot_rank[slot];
  }
  const Counted of_slot = count_entries(slot, group, lane, counts);
  const Counted of_rank = count_entries(dest, group, lane, counts + args.placement.slots);
  __syncwarp();
  if (!mine.exists) return false;
  choices.slot[mine.at] = slot;
  choices.dest[mine.at] = dest;
  choices.row[mine.at] = of_slot.before;
  choices.token_row[mine.at] = of_rank.before;
  if (repeat != nullptr) repeat[mine.at] = slot >= 0 && !of_slot.first ? 1 : 0;
  return !valid && id != -1;
}

inline constexpr std::uint64_t kNoBadChoice = kWordData;

// The ids of a warp's first two steps, loaded before anything else is waited for.
struct FirstIds {
  std::int64_t now, next;
};
__device__ inline FirstIds load_first_ids(const CountArgs& args, const Run& run) {
  const int lane = lane_index();
  const auto step = static_cast<std::uint32_t>(tokens_per_step(args.context.topk));
  return {load_step_id(args, run.begin, run.end, lane),
          load_step_id(args, run.begin + step, run.end, lane)};
}

// One block: counts `run` of each warp, after a barrier that the caller has passed with counts of zero. The smallest bad choice goes to `bad`.
__device__ inline void count_run(const CountArgs& args, const CountShared& shared, const Run& run,
                                 FirstIds ids, const ChoiceArrays& choices, std::uint8_t* repeat,
                                 unsigned long long* bad) {
  const int topk = args.context.topk;
  const int lane = lane_index();
  const auto step = static_cast<std::uint32_t>(tokens_per_step(topk));
  std::int32_t* counts = shared.counts + warp_index() * shared.entries;
#pragma unroll 1
  for (std::uint32_t token = run.begin; token < run.end; token += step) {
    const StepLane mine = lane_of_step(token, run.end, topk, lane);
    const std::int64_t later = load_step_id(args, token + 2 * step, run.end, lane);
    if (count_step(args, shared, mine, ids.now, counts, choices, repeat)) {
      atomicMin(bad, static_cast<unsigned long long>(mine.at));
    }
    ids = {ids.next, later};
  }
}

__device__ inline int4 plus(const int4& a, const int4& b) {
  return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
}
// One thread a quad: makes of each warp's counts those of the warps before it; returns the sum.
__device__ inline int4 sum_over_warps(const CountShared& shared, int quad, int warps) {
  int4 before{0, 0, 0, 0};
  auto* at = reinterpret_cast<int4*>(shared.counts) + quad;
  const int stride = shared.entries / 4;
#pragma unroll 4
  for (int warp = 0; warp < warps; ++warp) {
    const int4 mine = at[warp * stride];
    at[warp * stride] = before;
    before = plus(before, mine);
  }
  return before;
}

// --- Telling ------------------------------------------------------------------------------------

__device__ inline WordPair pack_quad(std::uint32_t epoch, const int4& counts) {
  const auto two = [](int low, int high) {
    return static_cast<std::uint64_t>(static_cast<std::uint32_t>(low)) |
           (static_cast<std::uint64_t>(static_cast<std::uint32_t>(high)) << kCountBits);
  };
  return {pack_word(epoch, two(counts.x, counts.y)), pack_word(epoch, two(counts.z, counts.w))};
}
__device__ inline int4 unpack_quad(const WordPair& pair) {
  constexpr std::uint64_t kMask = (std::uint64_t{1} << kCountBits) - 1;
  const auto low = [](std::uint64_t word) { return static_cast<int>(word & kMask); };
  const auto high = [](std::uint64_t word) {
    return static_cast<int>((word >> kCountBits) & kMask);
  };
  return {low(pair.first), high(pair.first), low(pair.second), high(pair.second)};
}

// The counts of a pair without its epochs, and sums of them: two counts an addition.
__device__ inline WordPair data_of(const WordPair& pair) {
  return {pair.first & kWordData, pair.second & kWordData};
}
__device__ inline void add_to(WordPair& sum, const WordPair& data) {
  sum.first += data.first;
  sum.second += data.second;
}

inline constexpr int kChoiceBits = 8;
static_assert(kChoiceBits + kPlacementBits == kWordDataBits);
__host__ __device__ constexpr std::uint64_t hash_of_header(std::uint64_t second_word) {
  return second_word >> kChoiceBits;
}

// The header of a message: where the experts are believed to be, and what is wrong with the call or
// with the first bad choice.
__device__ inline WordPair header_pair(const CountArgs& args, std::uint32_t epoch, int which,
                                       std::uint64_t bad) {
  const auto topk = static_cast<std::uint64_t>(args.context.topk);
  auto status = static_cast<std::uint64_t>(args.call_status);
  std::uint64_t at = 0;
  auto id = static_cast<std::uint64_t>(args.wrong);
  if (bad != kNoBadChoice) {
    status = kPlanBadExpert;
    at = bad;
    if (which != 0) id = static_cast<std::uint64_t>(load_id(args, bad));
  }
  if (which == 0) {
    return {pack_word(epoch, (status << 32) | (at / topk)),
            pack_word(epoch, (args.placement_hash << kChoiceBits) | (at % topk))};
  }
  return {pack_word(epoch, id), pack_word(epoch, id >> kWordDataBits)};
}
// One thread a pair of the message: to the peers that this block tells.
__device__ inline void tell_peers(const RankContext& context, std::uint64_t message, int pair,
                                  const WordPair& words, int block, int blocks) {
#pragma unroll 1
  for (int peer = block; peer < context.ranks; peer += blocks) {
    store_pair_system(window_at<WordPair>(context, peer, message) + pair, words);
  }
}

}  // namespace wherry::kernels::cuda
