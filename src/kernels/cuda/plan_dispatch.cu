// Stages 2 and 3 in one launch, for few tokens: plan, then every row to its final place.
//
// What takes time with few tokens is the chain of things that wait for each other. So every block
// counts all tokens of its rank by itself instead of asking the other blocks; the counts travel in
// words that carry their epoch; meanwhile each warp has a piece of a token's row loaded and converted,
// and all of its places but the base, and sends it when the counts are there. The plan is written while
// the signal is on its way.
#include "kernels/cuda/decode_rows.cuh"
#include "kernels/cuda/fill_rows.cuh"
#include "kernels/cuda/launch.hpp"
#include "kernels/cuda/marks.cuh"
#include "kernels/cuda/pipeline.cuh"
#include "kernels/cuda/placing.cuh"
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
constexpr int kFirstFreeWarp = kWarps - kFreeWarps;

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

// One step: what a rank tells, and advances.
struct Step {
  std::uint32_t plans;
  std::uint32_t epoch;  // of the dispatch
};
constexpr auto kChannel = static_cast<std::uint32_t>(layout::Channel::dispatch);

// Warp 0 of the last block.
__device__ void signal(const PlanDispatchArgs& args, const Known& known, const Step& step) {
  signal_peers(args.count.context, known.windows, layout::Channel::dispatch, args.send.generation,
               step.epoch,
               [&](int peer) { return static_cast<std::uint32_t>(known.shared.to[peer]); });
}
__device__ inline std::uint64_t* signal_word(const PlanDispatchArgs& args, std::byte* window) {
  const RankContext& context = args.count.context;
  return reinterpret_cast<std::uint64_t*>(
      window + context.layout.signal(layout::Channel::dispatch, args.send.generation,
                                     static_cast<std::uint64_t>(context.rank)));
}
// Warp 0 of every block: its part of each signal. `before`: this lane's, loaded by the first block.
__device__ void add_to_signals(const PlanDispatchArgs& args, const Known& known, const Step& step,
                               std::uint64_t before, int blocks) {
  const RankContext& context = args.count.context;
  for (int peer = lane_index(); peer < context.ranks; peer += kWarpLanes) {
    auto* word = signal_word(args, known.windows[peer]);
    if (blockIdx.x == 0 && peer >= kWarpLanes) before = load_relaxed_system(word);
    const auto count = static_cast<std::uint32_t>(known.shared.to[peer]);
    const std::uint64_t part = layout::signal_part(before, layout::pack_signal(step.epoch, count),
                                                   blockIdx.x, static_cast<std::uint32_t>(blocks));
    fence_system();
    add_to_signal_after_fence(word, part);
  }
}
// One thread of each block, when the block has looked at the state: the last of them advances it.
__device__ void advance(const PlanDispatchArgs& args, const Step& step, int blocks) {
  RankState& state = *args.count.context.state;
  if (!is_last_to_leave(state, Arrival::planned, static_cast<std::uint32_t>(blocks))) return;
  state.plans = step.plans + 1;
  state.sent[kChannel][args.send.generation] = step.epoch;
}
// One block, all threads; `ends`: the one that tells the state.
__device__ bool wait(const PlanDispatchArgs& args, const CountShared& shared, const Step& step,
                     bool ends) {
  const RankContext& context = args.count.context;
  const StageInfo info{Stage::dispatch_recv, layout::Channel::dispatch, args.send.generation,
                       step.epoch};
  const bool received =
      wait_for_peers(context, info, [&](int peer) { return std::int64_t{shared.from[peer]}; });
  if (received && ends && threadIdx.x == 0) {
    context.state->received[kChannel][args.send.generation] = step.epoch;
  }
  return received;
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
  __shared__ std::uint32_t epoch_before;
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
  const std::uint32_t sent = thread == 0 ? context.state->sent[kChannel][args.send.generation] : 0;

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
  __syncwarp();
#endif
  std::uint32_t item_at = warp;
  Item item = item_of(chunk, pieces, row_bytes, item_at);
  const bool loads_item = pieces.loads_bulk && item_at < items;
  // Rows in front of the ids of other blocks cost 2 us while rows pushed each other out of the cache; now not.
  if (loads_item) load_piece<kQuantised>(args.send, item, buffers);
#pragma unroll 1
  for (int i = thread; i < marks.count * marks.entries; i += kThreads) marks.words[i] = 0;
  if (thread == 0) {
    bad = kNoBadChoice;
    flags = 0;
    epoch_before = sent;
  }
  store_placement(count, shared, placement);
#pragma unroll 1
  for (int peer = thread; peer < context.ranks; peer += kThreads) {
    windows[peer] = peer == thread ? window : context.windows[peer];
  }
  const StageBegin begin = begin_stage(context, look);
  if (begin.failed) {
    if (loads_item) wait_for_piece(buffers, 0);
    return;
  }
  const std::uint32_t plans = begin.epoch - 1;
  const Step step{plans, epoch_before + 1};
  const StageInfo info{Stage::plan, layout::Channel::counts, plans % layout::kCountGenerations,
                       plans / layout::kCountGenerations + 1};
  const Known known{shared, marks, slots, windows, chunk.begin};
  mark_choices(count, shared, marks, first_ids, threadIdx.x, kThreads, chunk.begin, chunk.end,
               slots, &bad);
  __syncthreads();
  std::uint64_t before = 0;
  const bool adds = args.adds_signals && blocks > 1;
  if (adds && blockIdx.x == 0 && thread < context.ranks && warp == 0) {
    before = load_relaxed_system(signal_word(args, windows[thread]));
  }
  // The last warps first: with few tokens they have nothing else to do.
  const int counter = kWarps - 1 - warp_index();
  send_counts(count, known, info, counter, blocks, bad);
  if (thread == kFirstFreeWarp * kWarpLanes) advance(args, step, blocks);

  bool counted = false;
  unsigned fills = 0;  // ranks_that_fill()
  Placed placed = Placed::good;
  std::uint32_t parity = 0;
#pragma unroll 1
  for (;;) {
    const bool has_item = item_at < items;
    // Code and arguments that are not cached come late while the rows of all blocks are loaded. So with many
    // tokens nothing new is begun before they are here (receiving counts meanwhile: 30 -> 33 us).
    if (kBulk && has_item) stage<kQuantised, kBulk>(args.send, item, pieces, buffers, parity);
    Place place{{}, -1, false, nullptr};
    Base base{nullptr, nullptr};
    if (has_item) {
      place = place_token(count, known, item.token, lane);
      base = base_of(context, args.send, item, place);
    }
    if (!kBulk && has_item) stage<kQuantised, kBulk>(args.send, item, pieces, buffers, parity);
    if (!counted) {
      receive_counts(count, shared, info, counter, kWarps, &flags);
      placed = finish_counts(count, shared, info, begin.epoch, blockIdx.x == 0, &flags, chunk.begin,
                             chunk.end);
      fills = ranks_that_fill(context, args.send.rows, shared.to, shared.from, lane);
      counted = true;
    }
    if (!has_item || placed != Placed::good) break;
    add_base(count, shared, place);
    const Target to = target_of(context, args.send, row_bytes, base, place, fills, lane);
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
  bool ends = blockIdx.x == 0;
  if (adds) {
    __syncthreads();
    if (warp == 0) add_to_signals(args, known, step, before, blocks);
  } else {
    ends =
        is_last_block(*context.state, Arrival::dispatch_sent, static_cast<std::uint32_t>(blocks));
    if (ends && warp == 0) signal(args, known, step);
  }
  if (placed == Placed::good) {
    write_plan(count, known, chunk);
    if (blockIdx.x == 0) add_loads(count, shared, kWarpLanes);
  }
  if (placed != Placed::good) fills = 0;
  if (!args.send.receive || (!ends && fills == 0) || !wait(args, shared, step, ends)) return;
  if (fills == 0) return;
  const auto all = static_cast<std::uint32_t>(blocks);
  const bool taken =
      fill_further_slots(context, args.send.generation, shared.from, args.send.scale_pitch, all);
  if (taken && thread == 0) is_last_to_leave(*context.state, Arrival::dispatch_received, all);
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
