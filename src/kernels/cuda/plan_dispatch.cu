// Stages 2 and 3 in one launch, for few tokens: plan, then every row to its final place.
//
// What takes time with few tokens is the chain of things that wait for each other. So every block
// counts all tokens of its rank by itself instead of asking the other blocks; the counts travel in
// words that carry their epoch; meanwhile each warp has a piece of a token's row loaded and converted,
// and all of its places but the base, and sends it when the counts are there. The plan is written while
// the signal is on its way.
#include "kernels/cuda/launch.hpp"
#include "kernels/cuda/marks.cuh"
#include "kernels/cuda/pipeline.cuh"
#include "kernels/cuda/placing.cuh"
#include "kernels/cuda/quantise.cuh"
#include "kernels/cuda/signals.cuh"

namespace wherry::kernels::cuda {

namespace {

constexpr int kMaxChoices =
    4096;  // of a rank: more are better counted by blocks that share the work
constexpr int kMaxTokens = 1024;  // whose marks are looked through word by word

constexpr int kThreads = kCountThreads;
constexpr int kWarps = kCountWarps;
// A block with few tokens leaves warps free for the counts: 9.8 -> 9.2 us with one token.
constexpr int kFreeWarps = 6;

// Rows are made ready in steps of 512 bytes of the row that travels; a piece has some of them.
constexpr std::uint32_t kStepBytes = 512;
constexpr std::uint32_t kStepScaleBytes = kPieceElements / kBlockElements * sizeof(float);
constexpr std::uint32_t kStepSourceBytes = 2 * kStepBytes;  // bf16 that becomes a step

// Shared memory: counts and marks, addresses of the windows, slots of the block's choices, and for each
// warp a piece as it travels, its scales, and what it is made from.
WHERRY_HD constexpr std::size_t count_bytes(const CountSizes& sizes, int tokens) {
  return layout::round_up(
      static_cast<std::uint64_t>(sizes.fixed() + num_mark_words(tokens) * sizes.entries()) *
          sizeof(std::int32_t),
      128);
}
WHERRY_HD constexpr std::size_t address_bytes(int ranks) {
  return layout::round_up(static_cast<std::uint64_t>(ranks) * sizeof(std::byte*), 128);
}
WHERRY_HD constexpr std::size_t slot_bytes(int chunk_tokens, int topk) {
  return layout::round_up(static_cast<std::uint64_t>(chunk_tokens) *
                              static_cast<std::uint64_t>(topk) * sizeof(std::int32_t),
                          128);
}
constexpr std::size_t piece_bytes(int steps, bool quantised, bool loads_bulk) {
  return static_cast<std::size_t>(steps) *
         (kStepBytes + (quantised ? kStepScaleBytes + (loads_bulk ? kStepSourceBytes : 0U) : 0U));
}

// What a kernel is told about its shape.
struct Pieces {
  std::uint32_t of_row;
  std::uint32_t steps;  // of a piece
  bool loads_bulk;
};

// A warp's part of shared memory.
struct Buffers {
  std::byte* row;
  std::byte* scales;
  std::byte*
      source;  // bulk loads go here: quantised rows are made from it, others travel from there
  std::uint64_t* loaded;
};

// Tokens [begin, end) of a block.
struct Chunk {
  std::uint32_t begin, end;
};

// What a warp does at a time: a piece of a token's row.
struct Item {
  std::uint32_t token;
  std::uint32_t piece;
  std::uint32_t first_step;
  std::uint32_t bytes;  // of the row
};
__device__ Item item_of(const Chunk& chunk, const Pieces& pieces, std::uint32_t row_bytes,
                        std::uint32_t at) {
  const std::uint32_t piece = at % pieces.of_row;
  const std::uint32_t first = piece * pieces.steps;
  return {chunk.begin + at / pieces.of_row, piece, first,
          min(pieces.steps * kStepBytes, row_bytes - first * kStepBytes)};
}

// --- Rows to shared memory ----------------------------------------------------------------------

// The source of a piece, asked for by one lane.
template <bool kQuantised>
__device__ void load_piece(const Outgoing& send, const Item& item, const Buffers& buffers) {
#ifdef WHERRY_HAS_BULK_COPY
  constexpr std::uint32_t kFactor = kQuantised ? 2 : 1;
  if (lane_index() != 0) return;
  const std::uint32_t barrier = shared_address(buffers.loaded);
  barrier_expect_bytes(barrier, kFactor * item.bytes);
  bulk_load(shared_address(buffers.source),
            send.x + item.token * send.x_pitch + item.first_step * (kFactor * kStepBytes),
            kFactor * item.bytes, barrier);
#endif
}
__device__ void wait_for_piece(const Buffers& buffers, std::uint32_t parity) {
#ifdef WHERRY_HAS_BULK_COPY
  barrier_wait(shared_address(buffers.loaded), parity);
#endif
}

// `from`: the item's first element, in shared or global memory.
__device__ void quantise_piece(const Item& item, const std::byte* from, const Buffers& buffers) {
  const auto lane_element = static_cast<std::uint32_t>(lane_index() * kLaneElements);
  const auto load = [&](std::uint32_t element, uint4(&packed)[2]) {
    packed[0] = packed[1] = uint4{};
    if (element >= item.bytes) return;
    const auto* at = reinterpret_cast<const uint4*>(from + element * 2);
    packed[0] = at[0];
    packed[1] = at[1];
  };
  uint4 next[2];
  load(lane_element, next);
#pragma unroll 1
  for (std::uint32_t element = lane_element; element - lane_element < item.bytes;
       element += kPieceElements) {
    const uint4 packed[2] = {next[0], next[1]};
    load(element + kPieceElements, next);
    float scale;
    const uint4 codes = quantise(packed, scale);
    if (element < item.bytes) *reinterpret_cast<uint4*>(buffers.row + element) = codes;
    if (lane_index() % kLanesPerBlock != 0) continue;
    reinterpret_cast<float*>(buffers.scales)[element / kBlockElements] =
        element < item.bytes ? scale : 0.0F;
  }
}

// One warp: its piece as it travels.
template <bool kQuantised, bool kBulk>
__device__ void stage(const Outgoing& send, const Item& item, const Pieces& pieces,
                      const Buffers& buffers, std::uint32_t parity) {
  const std::byte* from = send.x + item.token * send.x_pitch +
                          item.first_step * (kQuantised ? kStepSourceBytes : kStepBytes);
  if (pieces.loads_bulk) {
    wait_for_piece(buffers, parity);
    from = buffers.source;
  }
  if constexpr (kQuantised) {
    quantise_piece(item, from, buffers);
  } else if (!pieces.loads_bulk) {
    for (auto at = static_cast<std::uint32_t>(lane_index()) * 16; at < item.bytes;
         at += kStepBytes) {
      *reinterpret_cast<uint4*>(buffers.row + at) = *reinterpret_cast<const uint4*>(from + at);
    }
  }
#ifdef WHERRY_HAS_BULK_COPY
  if constexpr (kBulk) fence_shared_to_bulk();
#endif
  __syncwarp();
}

// --- Places -------------------------------------------------------------------------------------

// What a block knows of its rank's choices.
struct Known {
  const CountShared& shared;
  Marks marks;
  const std::int32_t* slots;  // of the choices of the block's tokens
  std::byte* const* windows;
  std::uint32_t first_token;  // of the block
};

// One warp, one token: its choices, a lane each. Until add_base rows are counted from those of this
// rank's first token.
struct Place {
  Choice choice;
  std::int32_t slot;
  bool first_of_rank;
  std::byte* window;
};
__device__ Place place_token(const CountArgs& args, const Known& known, std::uint32_t token,
                             int lane) {
  Place place{{}, -1, false, nullptr};
  const auto topk = static_cast<std::uint32_t>(args.context.topk);
  if (lane < args.context.topk) {
    place.slot = known.slots[(token - known.first_token) * topk + static_cast<std::uint32_t>(lane)];
    if (place.slot >= 0) {
      place.choice.dest = known.shared.slot_rank[place.slot];
      place.choice.row = marked_before(known.marks, place.slot, token);
      place.choice.token_row =
          marked_before(known.marks, args.placement.slots + place.choice.dest, token);
      place.window = known.windows[place.choice.dest];
    }
  }
  const bool first = is_first_with(place.slot, lane);  // of all lanes
  place.choice.repeat = place.slot >= 0 && !first;
  place.first_of_rank = is_first_with(place.choice.dest, lane);
  return place;
}
__device__ void add_base(const CountArgs& args, const CountShared& shared, Place& place) {
  if (place.slot < 0) return;
  Choice& choice = place.choice;
  choice.row += shared.base[place.slot];
  if (args.drops && choice.row >= shared.end[place.slot]) choice.row = -1;
  choice.token_row += shared.base[args.placement.slots + choice.dest];
}

__device__ float weight_of(const CountArgs& args, std::uint32_t token, int lane) {
  if (args.weights == nullptr || lane >= args.context.topk) return 1.0F;
  return args.weights[token * static_cast<std::uint32_t>(args.context.topk) +
                      static_cast<std::uint32_t>(lane)];
}

// --- Rows to their places -----------------------------------------------------------------------

// Where this lane's copies of a piece begin in the first row of its window: asked for before the rows
// are known.
struct Base {
  std::byte* row;
  std::byte* scales;
};
__device__ Base base_of(const RankContext& context, const Outgoing& send, const Item& item,
                        const Place& place) {
  return {place.window + context.layout.row(send.generation, 0) + item.first_step * kStepBytes,
          place.window + context.layout.scale_plane(send.generation) +
              item.first_step * kStepScaleBytes};
}
// This lane's row and scales of a piece, if it has a place.
struct Target {
  bool sends;
  std::byte* row;
  std::byte* scales;
};
__device__ Target target_of(const Outgoing& send, std::uint32_t row_bytes, const Base& base,
                            const Place& place) {
  const Choice& choice = place.choice;
  const bool sends =
      send.rows == Rows::per_slot ? choice.row >= 0 && !choice.repeat : place.first_of_rank;
  const auto row =
      static_cast<std::uint32_t>(send.rows == Rows::per_rank ? choice.token_row : choice.row);
  return {sends, base.row + std::uint64_t{row} * row_bytes, base.scales + row * send.scale_pitch};
}
__device__ std::uint32_t scale_bytes_of(const Outgoing& send, const Item& item,
                                        const Pieces& pieces) {
  return min(pieces.steps * kStepScaleBytes,
             static_cast<std::uint32_t>(send.scale_pitch) - item.first_step * kStepScaleBytes);
}

// One warp, a piece, by bulk copies, each of the lane that has the place. (They leave one after the
// other.)
template <bool kQuantised>
__device__ void send_bulk(const Outgoing& send, const Item& item, const Pieces& pieces,
                          const Buffers& buffers, const Target& to) {
#ifdef WHERRY_HAS_BULK_COPY
  if (!to.sends) return;
  bulk_store_kept(to.row, shared_address(buffers.row), item.bytes);
  if constexpr (kQuantised) {
    bulk_store_kept(to.scales, shared_address(buffers.scales), scale_bytes_of(send, item, pieces));
  }
  bulk_commit();
#endif
}

// One warp, a piece, by ordinary stores.
template <bool kQuantised>
__device__ void send_piece(const Outgoing& send, const Item& item, const Pieces& pieces,
                           const Buffers& buffers, const Target& to, int lane) {
  const unsigned lanes = __ballot_sync(kAllLanes, to.sends);
  const auto mine = static_cast<std::uint32_t>(lane) * std::uint32_t{sizeof(uint4)};
  // What leaves for all places is read once; a piece is seldom longer than a step.
#pragma unroll 1
  for (std::uint32_t at = mine; at - mine < item.bytes; at += kStepBytes) {
    const bool has_unit = at < item.bytes;
    bool has_scales = false;
    uint4 unit{};
    uint4 scales{};
    if (has_unit) unit = *reinterpret_cast<const uint4*>(buffers.row + at);
    if constexpr (kQuantised) {
      has_scales = at < scale_bytes_of(send, item, pieces);
      if (has_scales) scales = *reinterpret_cast<const uint4*>(buffers.scales + at);
    }
    for_each_lane(lanes, [&](int source) {
      auto* row = reinterpret_cast<std::byte*>(
          __shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(to.row), source));
      if (has_unit) *reinterpret_cast<uint4*>(row + at) = unit;
      if constexpr (kQuantised) {
        auto* place = reinterpret_cast<std::byte*>(
            __shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(to.scales), source));
        if (has_scales) *reinterpret_cast<uint4*>(place + at) = scales;
      }
    });
  }
}

// The block's warps but the first, which signals meanwhile: its tokens' part of the plan, and with the
// first block what arrives. Nothing in this launch reads it.
__device__ void write_plan(const CountArgs& args, const Known& known, const Chunk& chunk) {
  const int lane = lane_index();
  const auto topk = static_cast<std::uint32_t>(args.context.topk);
  if (warp_index() == 0) return;
  if (warp_index() == kWarps - 1 && blockIdx.x == 0) write_arrivals(args, known.shared);
#pragma unroll 1
  for (std::uint32_t token = chunk.begin + static_cast<std::uint32_t>(warp_index()) - 1;
       token < chunk.end; token += kWarps - 1) {
    const float weight = weight_of(args, token, lane);
    Place place = place_token(args, known, token, lane);
    if (lane >= args.context.topk) continue;
    add_base(args, known.shared, place);
    const std::uint32_t at = token * topk + static_cast<std::uint32_t>(lane);
    args.plan.slot[at] = place.slot;
    args.plan.dest[at] = place.choice.dest;
    args.plan.row[at] = place.choice.row;
    args.plan.token_row[at] = place.choice.token_row;
    args.plan.weight[at] = place.choice.row >= 0 ? weight : 0.0F;
    args.plan.repeat[at] = place.choice.repeat ? 1 : 0;
  }
}

// One step: what the last block of a rank advances, and tells.
struct Step {
  std::uint32_t plans;
  std::uint32_t epoch;  // of the dispatch
};
__device__ void signal(const PlanDispatchArgs& args, const Known& known, const Step& step) {
  constexpr auto kChannel = static_cast<std::uint32_t>(layout::Channel::dispatch);
  const RankContext& context = args.count.context;
  signal_peers(context, known.windows, layout::Channel::dispatch, args.send.generation, step.epoch,
               [&](int peer) { return static_cast<std::uint32_t>(known.shared.to[peer]); });
  if (threadIdx.x != 0) return;
  context.state->plans = step.plans + 1;
  context.state->sent[kChannel][args.send.generation] = step.epoch;
}
__device__ void wait(const PlanDispatchArgs& args, const CountShared& shared, const Step& step) {
  constexpr auto kChannel = static_cast<std::uint32_t>(layout::Channel::dispatch);
  const RankContext& context = args.count.context;
  const StageInfo info{Stage::dispatch_recv, layout::Channel::dispatch, args.send.generation,
                       step.epoch};
  const bool received =
      wait_for_peers(context, info, [&](int peer) { return std::int64_t{shared.from[peer]}; });
  if (received && threadIdx.x == 0) {
    context.state->received[kChannel][args.send.generation] = step.epoch;
  }
}

// One block: the counts of this rank to the peers that are this block's to tell. As many warps as a
// message has pairs for share a peer.
__device__ void send_counts(const CountArgs& args, const Known& known, const StageInfo& info,
                            int warp, int blocks, std::uint64_t bad) {
  const RankContext& context = args.context;
  const std::uint64_t message =
      context.layout.count_message(info.generation, static_cast<std::uint64_t>(context.rank));
  const int pairs = kHeaderPairs + known.shared.entries / 4;
  const int warps = min((pairs + kWarpLanes - 1) / kWarpLanes, kWarps);
  const int teams = kWarps / warps;
  const int first_peer = static_cast<int>(blockIdx.x) + warp / warps * blocks;
  if (warp >= teams * warps || first_peer >= context.ranks) return;
#pragma unroll 1
  for (int pair = warp % warps * kWarpLanes + lane_index(); pair < pairs;
       pair += warps * kWarpLanes) {
    const WordPair words =
        pair < kHeaderPairs ? header_pair(args, info.epoch, pair, bad)
                            : pack_quad(info.epoch, count_marks(known.marks, pair - kHeaderPairs));
#pragma unroll 1
    for (int peer = first_peer; peer < context.ranks; peer += teams * blocks) {
      store_pair_system(reinterpret_cast<WordPair*>(known.windows[peer] + message) + pair, words);
    }
  }
}

template <bool kQuantised, bool kBulk>
__global__ void __launch_bounds__(kThreads, 1)
    plan_dispatch(const __grid_constant__ RankTable<PlanDispatchArgs> table, const Pieces pieces) {
  extern __shared__ __align__(128) std::byte plan_memory[];
  __shared__ std::uint64_t loaded[kWarps];
  __shared__ unsigned long long bad;
  __shared__ unsigned flags;
  const PlanDispatchArgs& args = table.rank[blockIdx.y];
  const CountArgs& count = args.count;
  const RankContext& context = count.context;
  touch_arguments(args, context);
  const int blocks = num_counting_blocks(count.plan.tokens, count.chunk_tokens);
  if (static_cast<int>(blockIdx.x) >= blocks) return;

  // What is not there yet is asked for at once.
  const auto thread = static_cast<int>(threadIdx.x);
  const StageLook look = look_at_stage(context, context.state->plans);
  const auto tokens = static_cast<std::uint32_t>(count.plan.tokens);
  const FirstIds first_ids = load_first_choices(
      count, tokens * static_cast<std::uint32_t>(context.topk), threadIdx.x, kThreads);
  const PlacementPart placement = load_placement_part(count, thread);
  std::byte* const window = thread < context.ranks ? context.windows[thread] : nullptr;
  constexpr auto kChannel = static_cast<std::uint32_t>(layout::Channel::dispatch);
  const std::uint32_t sent = context.state->sent[kChannel][args.send.generation];

  const int lane = lane_index();
  const auto warp = static_cast<std::uint32_t>(warp_index());
  const auto chunk_tokens = static_cast<std::uint32_t>(count.chunk_tokens);
  const std::uint32_t first_token = min(blockIdx.x * chunk_tokens, tokens);
  const Chunk chunk{first_token, min(first_token + chunk_tokens, tokens)};
  const auto row_bytes = static_cast<std::uint32_t>(context.layout.row_pitch);
  const std::uint32_t items = (chunk.end - chunk.begin) * pieces.of_row;
  const CountShared shared = count_shared(reinterpret_cast<std::int32_t*>(plan_memory), count);
  const Marks marks{reinterpret_cast<std::uint32_t*>(shared.counts), shared.entries,
                    num_mark_words(count.plan.tokens)};
  auto* at =
      plan_memory + count_bytes({count.placement.experts, count.placement.slots, context.ranks},
                                count.plan.tokens);
  auto** windows = reinterpret_cast<std::byte**>(at);
  at += address_bytes(context.ranks);
  auto* slots = reinterpret_cast<std::int32_t*>(at);
  at += slot_bytes(count.chunk_tokens, context.topk);
  Buffers buffers{};
  buffers.row = at + warp * pieces.steps * kStepBytes;
  buffers.source = buffers.row;
  at += kWarps * pieces.steps * kStepBytes;
  if constexpr (kQuantised) {
    buffers.scales = at + warp * pieces.steps * kStepScaleBytes;
    at += kWarps * pieces.steps * kStepScaleBytes;
    buffers.source = at + warp * pieces.steps * kStepSourceBytes;
  }
  buffers.loaded = &loaded[warp];
#ifdef WHERRY_HAS_BULK_COPY
  if (pieces.loads_bulk && lane == 0) {
    barrier_init(shared_address(buffers.loaded), 1);
    barrier_init_fence();
  }
#endif
  std::uint32_t item_at = warp;
  Item item = item_of(chunk, pieces, row_bytes, item_at);
  const bool loads_item = pieces.loads_bulk && item_at < items;
  if (!kBulk && loads_item) load_piece<kQuantised>(args.send, item, buffers);
#pragma unroll 1
  for (int i = thread; i < marks.count * marks.entries; i += kThreads) marks.words[i] = 0;
  if (thread == 0) {
    bad = kNoBadChoice;
    flags = 0;
  }
  store_placement(count, shared, placement);
#pragma unroll 1
  for (int peer = thread; peer < context.ranks; peer += kThreads) {
    windows[peer] = peer == thread ? window : context.windows[peer];
  }
  const StageBegin begin = begin_stage(context, look);
  if (begin.failed) {
    if (!kBulk && loads_item) wait_for_piece(buffers, 0);
    return;
  }
  const std::uint32_t plans = begin.epoch - 1;
  const StageInfo info{Stage::plan, layout::Channel::counts, plans % layout::kCountGenerations,
                       plans / layout::kCountGenerations + 1};
  const Known known{shared, marks, slots, windows, chunk.begin};
  mark_choices(count, shared, marks, first_ids, threadIdx.x, kThreads, chunk.begin, chunk.end,
               slots, &bad);
  __syncthreads();
  // Not before: many rows would stand in front of the ids and the placement of other blocks.
  if (kBulk && loads_item) load_piece<kQuantised>(args.send, item, buffers);
  // The last warps first: with few tokens they have nothing else to do.
  const int counter = kWarps - 1 - warp_index();
  send_counts(count, known, info, counter, blocks, bad);

  bool counted = false;
  Placed placed = Placed::good;
  std::uint32_t parity = 0;
#pragma unroll 1
  for (;;) {
    const bool has_item = item_at < items;
    if (has_item) stage<kQuantised, kBulk>(args.send, item, pieces, buffers, parity);
    Place place{{}, -1, false, nullptr};
    Base base{nullptr, nullptr};
    if (has_item) {
      place = place_token(count, known, item.token, lane);
      base = base_of(context, args.send, item, place);
    }
    if (!counted) {
      receive_counts(count, shared, info, counter, kWarps, &flags);
      placed = finish_counts(count, shared, info, begin.epoch, blockIdx.x == 0, &flags, chunk.begin,
                             chunk.end);
      counted = true;
    }
    if (!has_item || placed != Placed::good) break;
    add_base(count, shared, place);
    const Target to = target_of(args.send, row_bytes, base, place);
    if constexpr (kBulk) {
      send_bulk<kQuantised>(args.send, item, pieces, buffers, to);
    } else {
      send_piece<kQuantised>(args.send, item, pieces, buffers, to, lane);
    }
    if (args.send.entries && item.piece == 0) {
      place.choice.weight = place.choice.row >= 0 ? weight_of(count, item.token, lane) : 0.0F;
      write_entries(context, args.send, place.choice, __ballot_sync(kAllLanes, place.first_of_rank),
                    lane);
    }
    item_at += kWarps;
    if (item_at >= items) break;
    item = item_of(chunk, pieces, row_bytes, item_at);
#ifdef WHERRY_HAS_BULK_COPY
    if constexpr (kBulk) bulk_wait_read<0>();
#endif
    __syncwarp();
    if (pieces.loads_bulk) load_piece<kQuantised>(args.send, item, buffers);
    parity ^= 1U;
  }
  if (placed == Placed::failed) return;
#ifdef WHERRY_HAS_BULK_COPY
  if constexpr (kBulk) bulk_wait_written();
#endif
  const Step step{plans, sent + 1};
  const bool last =
      is_last_block(*context.state, Arrival::dispatch_sent, static_cast<std::uint32_t>(blocks));
  if (last && warp == 0) signal(args, known, step);
  if (placed == Placed::good) {
    write_plan(count, known, chunk);
    if (blockIdx.x == 0) add_loads(count, shared, kWarpLanes);
  }
  if (last && args.send.receive) wait(args, shared, step);
}

template <bool kQuantised, bool kBulk>
cudaError_t launch(const RankTable<PlanDispatchArgs>& table, int ranks,
                   const PlanDispatchShape& shape, cudaStream_t stream) {
  int blocks = 1;
  for (int rank = 0; rank < ranks; ++rank) {
    const CountArgs& each = table.rank[rank].count;
    const int counting = num_counting_blocks(each.plan.tokens, each.chunk_tokens);
    blocks = counting > blocks ? counting : blocks;
  }
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(ranks));
  const Pieces pieces{static_cast<std::uint32_t>(shape.pieces),
                      static_cast<std::uint32_t>(shape.piece_steps), shape.loads_bulk};
  plan_dispatch<kQuantised, kBulk><<<grid, kThreads, shape.shared_bytes, stream>>>(table, pieces);
  return cudaGetLastError();
}

template <bool kQuantised, bool kBulk>
cudaError_t allow_shared(int shared_bytes) {
  return cudaFuncSetAttribute(plan_dispatch<kQuantised, kBulk>,
                              cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
}

}  // namespace

PlanDispatchShape choose_plan_dispatch_shape(const PlanDispatchJob& job) {
  PlanDispatchShape shape;
  shape.quantised = job.scale_pitch != 0;
  // A bulk copy takes longer to start and to end than a store, and has more bytes on the way.
  constexpr int kBulkTokens = 4;
  const int chunk = job.tokens > job.num_sms ? (job.tokens + job.num_sms - 1) / job.num_sms : 1;
  shape.loads_bulk = job.bulk;
  shape.bulk = job.bulk && chunk >= kBulkTokens;
  // A piece for each warp, but no larger than the memory.
  const int steps = static_cast<int>((job.row_bytes + kStepBytes - 1) / kStepBytes);
  const int warps = chunk < kBulkTokens ? kWarps - kFreeWarps : kWarps;
  const int wanted = chunk < warps ? warps / chunk : 1;
  shape.piece_steps = (steps + wanted - 1) / wanted;
  const std::size_t known = count_bytes({job.experts, job.slots, job.ranks}, job.tokens) +
                            address_bytes(job.ranks) + slot_bytes(chunk, job.topk);
  const auto bytes = [&](int piece_steps) {
    return known + kWarps * piece_bytes(piece_steps, shape.quantised, shape.loads_bulk);
  };
  const auto limit = static_cast<std::size_t>(job.shared_bytes);
  while (shape.piece_steps > 1 && bytes(shape.piece_steps) > limit) --shape.piece_steps;
  shape.pieces = shape.piece_steps > 0 ? (steps + shape.piece_steps - 1) / shape.piece_steps : 1;
  shape.shared_bytes = bytes(shape.piece_steps);
  const bool fits = job.row_bytes > 0 && job.row_bytes % 16 == 0 && job.tokens <= kMaxTokens &&
                    job.tokens * job.topk <= kMaxChoices && shape.shared_bytes <= limit;
  shape.chunk_tokens = fits ? chunk : 0;
  return shape;
}

cudaError_t launch_plan_dispatch(const RankTable<PlanDispatchArgs>& table, int ranks,
                                 const PlanDispatchShape& shape, cudaStream_t stream) {
  if (shape.chunk_tokens == 0) return cudaErrorInvalidConfiguration;
  if (shape.quantised) {
    return shape.bulk ? launch<true, true>(table, ranks, shape, stream)
                      : launch<true, false>(table, ranks, shape, stream);
  }
  return shape.bulk ? launch<false, true>(table, ranks, shape, stream)
                    : launch<false, false>(table, ranks, shape, stream);
}

cudaError_t prepare_plan_dispatch() {
  int bytes = 0;
  const cudaError_t asked = shared_bytes_of_block(bytes);
  if (asked != cudaSuccess) return asked;
  for (const cudaError_t each :
       {allow_shared<true, true>(bytes), allow_shared<true, false>(bytes),
        allow_shared<false, true>(bytes), allow_shared<false, false>(bytes)}) {
    if (each != cudaSuccess) return each;
  }
  return cudaSuccess;
}

}  // namespace wherry::kernels::cuda
