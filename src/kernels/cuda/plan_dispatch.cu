// Stages 2 and 3 in one launch, for few tokens: plan, then every row to its final place.
//
// What takes time with few tokens is the chain of things that wait for each other. So every block
// counts all tokens of its rank by itself instead of asking the other blocks; the counts travel in
// words that carry their epoch; a block makes the rows of its own tokens ready in shared memory while
// they do; and the rows leave at once when the counts are there. The plan is written on the way.
#include "kernels/cuda/counting.cuh"
#include "kernels/cuda/launch.hpp"
#include "kernels/cuda/pipeline.cuh"
#include "kernels/cuda/placing.cuh"
#include "kernels/cuda/quantise.cuh"
#include "kernels/cuda/signals.cuh"

namespace wherry::kernels::cuda {

namespace {

constexpr std::uint32_t kPartTokens =
    4;  // made ready at a time; 2: 37.3 us instead of 34.8 with 128 tokens
constexpr int kMaxChoices =
    4096;  // of a rank: more are better counted by blocks that share the work

// Shared memory: counts, then the choices of all tokens, then rows and scales of the block's tokens.
WHERRY_HD constexpr std::size_t choice_bytes(int tokens, int topk) {
  return layout::round_up(static_cast<std::uint64_t>(tokens) * static_cast<std::uint64_t>(topk) *
                              4 * sizeof(std::int32_t),
                          128);
}
WHERRY_HD constexpr std::size_t count_bytes(const CountSizes& sizes, int warps) {
  return layout::round_up(
      static_cast<std::uint64_t>(sizes.fixed() + warps * sizes.entries()) * sizeof(std::int32_t),
      128);
}
WHERRY_HD constexpr int warps_that_count(int tokens, int topk) {
  const int step = kWarpLanes / topk;
  const int warps = (tokens + step - 1) / step;
  return warps < 1 ? 1 : (warps < kCountWarps ? warps : kCountWarps);
}

struct Staging {
  std::byte* rows;    // [tokens of the block], row_pitch apart
  std::byte* scales;  // [tokens of the block], scale_pitch apart
};

// Tokens [begin, end) of a block.
struct Chunk {
  std::uint32_t begin, end;
};

// One instruction a row: a loop over cache lines stood in front of the counting for a microsecond.
__device__ void prefetch_rows(const Outgoing& send, const Chunk& chunk, std::uint32_t row_bytes) {
#ifdef WHERRY_HAS_BULK_COPY
  const std::uint32_t token = chunk.begin + threadIdx.x;
  const std::byte* row = send.x + token * send.x_pitch;
  if (token < chunk.end && (reinterpret_cast<std::uintptr_t>(row) | row_bytes) % 16 == 0) {
    bulk_prefetch(row, row_bytes);
  }
#endif
}

// --- Rows to shared memory ----------------------------------------------------------------------

// A warp takes pieces of 512 elements; the next one is loaded while one is converted.
__device__ void stage_quantised(const Outgoing& send, const Chunk& chunk, const Staging& staging,
                                std::uint32_t hidden, std::uint64_t row_pitch) {
  const std::uint32_t pieces = (hidden + kPieceElements - 1) / kPieceElements;
  const std::uint32_t items = (chunk.end - chunk.begin) * pieces;
  const auto lane_element = static_cast<std::uint32_t>(lane_index() * kLaneElements);
  const auto load = [&](std::uint32_t item, uint4(&packed)[2]) {
    const std::uint32_t element = item % pieces * kPieceElements + lane_element;
    packed[0] = packed[1] = uint4{};
    if (item >= items || element >= hidden) return;
    load_elements(send.x + (chunk.begin + item / pieces) * send.x_pitch + element * 2, packed);
  };
  uint4 next[2];
  load(static_cast<std::uint32_t>(warp_index()), next);
#pragma unroll 1
  for (auto item = static_cast<std::uint32_t>(warp_index()); item < items; item += kCountWarps) {
    const uint4 packed[2] = {next[0], next[1]};
    load(item + kCountWarps, next);
    float scale;
    const uint4 codes = quantise(packed, scale);
    const std::uint32_t token = item / pieces;
    const std::uint32_t element = item % pieces * kPieceElements + lane_element;
    if (element >= hidden) continue;
    *reinterpret_cast<uint4*>(staging.rows + token * row_pitch + element) = codes;
    if (lane_index() % kLanesPerBlock == 0) {
      auto* scales = reinterpret_cast<float*>(staging.scales + token * send.scale_pitch);
      scales[element / kBlockElements] = scale;
    }
  }
}

__device__ void stage_as_they_are(const Outgoing& send, const Chunk& chunk, const Staging& staging,
                                  std::uint64_t row_pitch) {
  const auto units = static_cast<std::uint32_t>(row_pitch / sizeof(uint4));
#pragma unroll 2
  for (std::uint32_t at = threadIdx.x; at < (chunk.end - chunk.begin) * units; at += blockDim.x) {
    const std::uint32_t token = at / units;
    const auto* from =
        reinterpret_cast<const uint4*>(send.x + (chunk.begin + token) * send.x_pitch);
    reinterpret_cast<uint4*>(staging.rows + token * row_pitch)[at % units] =
        __ldcs(from + at % units);
  }
}

// Rows of `part` of the block's tokens, which begin at first_token.
template <bool kQuantised, bool kBulk>
__device__ void stage(const PlanDispatchArgs& args, const Chunk& part, std::uint32_t first_token,
                      const Staging& whole) {
  const layout::WindowLayout& layout = args.count.context.layout;
  const std::uint32_t before = part.begin - first_token;
  const Staging staging{whole.rows + before * layout.row_pitch,
                        whole.scales + before * args.send.scale_pitch};
  if constexpr (kQuantised) {
    stage_quantised(args.send, part, staging, static_cast<std::uint32_t>(layout.row_bytes),
                    layout.row_pitch);
  } else {
    stage_as_they_are(args.send, part, staging, layout.row_pitch);
  }
#ifdef WHERRY_HAS_BULK_COPY
  if constexpr (kBulk) fence_shared_to_bulk();
#endif
}

// --- Choices ------------------------------------------------------------------------------------

// One warp, one token of this rank: its choices with their final rows.
__device__ Choice place_token(const CountArgs& args, const CountShared& shared,
                              const ChoiceArrays& choices, std::uint32_t tokens_of_warp,
                              std::uint32_t token, int lane) {
  Choice choice;
  const int topk = args.context.topk;
  std::int32_t slot = -1;
  if (lane < topk) {
    const std::size_t at = static_cast<std::size_t>(token) * static_cast<std::size_t>(topk) +
                           static_cast<std::size_t>(lane);
    slot = choices.slot[at];
    if (slot >= 0) {
      const std::int32_t* earlier = shared.counts + token / tokens_of_warp * shared.entries;
      choice.dest = choices.dest[at];
      const std::int32_t rank = args.placement.slots + choice.dest;
      choice.row = choices.row[at] + earlier[slot] + shared.base[slot];
      if (args.drops && choice.row >= shared.end[slot]) choice.row = -1;
      choice.token_row = choices.token_row[at] + earlier[rank] + shared.base[rank];
    }
  }
  const bool first = is_first_with(slot, lane);
  choice.repeat = slot >= 0 && !first;
  return choice;
}

__device__ float weight_of(const CountArgs& args, std::uint32_t token, int lane) {
  if (args.weights == nullptr || lane >= args.context.topk) return 1.0F;
  return args.weights[token * static_cast<std::uint32_t>(args.context.topk) +
                      static_cast<std::uint32_t>(lane)];
}

// --- Rows to their places -----------------------------------------------------------------------

// One warp, one token, by bulk copies: of the lanes whose choices get a row, those whose turn among
// `turns` warps it is send it. (They do so one after the other.)
__device__ void send_bulk(const RankContext& context, const Outgoing& send, const Staging& staging,
                          std::uint32_t local, const Choice& choice, const Destinations& to,
                          std::uint32_t turn, std::uint32_t turns) {
#ifdef WHERRY_HAS_BULK_COPY
  const int lane = lane_index();
  const auto order = static_cast<std::uint32_t>(__popc(to.lanes & lanes_before(lane)));
  if (((to.lanes >> lane) & 1U) == 0 || order % turns != turn) return;
  const auto row_bytes = static_cast<std::uint32_t>(context.layout.row_pitch);
  bulk_store_kept(to.to, shared_address(staging.rows + local * context.layout.row_pitch),
                  row_bytes);
  if (send.scale_pitch != 0) {
    bulk_store_kept(scales_at(context, send, choice.dest, to.row),
                    shared_address(staging.scales + local * send.scale_pitch),
                    static_cast<std::uint32_t>(send.scale_pitch));
  }
  bulk_commit();
#endif
}

// One warp, a piece of one token's row and, with the first, its scales, by ordinary stores.
__device__ void send_piece(const RankContext& context, const Outgoing& send, const Staging& staging,
                           std::uint32_t local, std::uint32_t piece, const Choice& choice,
                           const Destinations& to, int lane) {
  constexpr std::uint32_t kUnits = 2 * kWarpLanes;
  const auto row_units = static_cast<std::uint32_t>(context.layout.row_pitch / sizeof(uint4));
  const auto scale_units = static_cast<std::uint32_t>(send.scale_pitch / sizeof(uint4));
  const auto* row = reinterpret_cast<const uint4*>(staging.rows + local * context.layout.row_pitch);
  const auto* scales = reinterpret_cast<const uint4*>(staging.scales + local * send.scale_pitch);
  std::byte* my_scales = nullptr;
  if (send.scale_pitch != 0 && ((to.lanes >> lane) & 1U) != 0) {
    my_scales = scales_at(context, send, choice.dest, to.row);
  }
  for_each_lane(to.lanes, [&](int source) {
    auto* row_to = reinterpret_cast<uint4*>(
        __shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(to.to), source));
    auto* scales_to = reinterpret_cast<uint4*>(
        __shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(my_scales), source));
#pragma unroll
    for (std::uint32_t i = 0; i < 2; ++i) {
      const std::uint32_t at = piece * kUnits + i * kWarpLanes + static_cast<std::uint32_t>(lane);
      if (at < row_units) row_to[at] = row[at];
    }
    if (piece != 0) return;
    for (auto at = static_cast<std::uint32_t>(lane); at < scale_units; at += kWarpLanes) {
      scales_to[at] = scales[at];
    }
  });
}

// What a block knows when the counts have come.
struct Ready {
  const CountShared& shared;
  const ChoiceArrays& choices;
  std::uint32_t tokens_of_warp;
  std::uint32_t first_token;  // of the block
  Staging staging;
};

template <bool kBulk>
__device__ void send_tokens(const PlanDispatchArgs& args, const Ready& ready, const Chunk& part) {
  const CountArgs& count = args.count;
  const RankContext& context = count.context;
  const int lane = lane_index();
  const auto row_units = static_cast<std::uint32_t>(context.layout.row_pitch / sizeof(uint4));
  const std::uint32_t tokens = max(part.end - part.begin, 1U);
  const std::uint32_t pieces = kBulk ? max(static_cast<std::uint32_t>(kCountWarps) / tokens, 1U)
                                     : (row_units + 2 * kWarpLanes - 1) / (2 * kWarpLanes);
  const std::uint32_t items = (part.end - part.begin) * pieces;
#pragma unroll 1
  for (auto item = static_cast<std::uint32_t>(warp_index()); item < items; item += kCountWarps) {
    const std::uint32_t token = part.begin + item / pieces;
    const std::uint32_t local = token - ready.first_token;
    const std::uint32_t piece = item % pieces;
    Choice choice =
        place_token(count, ready.shared, ready.choices, ready.tokens_of_warp, token, lane);
    const Destinations to = destinations_of(context, args.send, choice, lane);
    if constexpr (kBulk) {
      send_bulk(context, args.send, ready.staging, local, choice, to, piece, pieces);
    } else {
      send_piece(context, args.send, ready.staging, local, piece, choice, to, lane);
    }
    if (args.send.entries && piece == 0) {
      choice.weight = choice.row >= 0 ? weight_of(count, token, lane) : 0.0F;
      write_entries(context, args.send, choice, to.first_of_rank, lane);
    }
  }
}

// The block's warps but the first, which signals meanwhile: its tokens' part of the plan, and with the
// first block what arrives. Nothing in this launch reads it.
__device__ void write_plan(const CountArgs& args, const Ready& ready, const Chunk& chunk) {
  const int lane = lane_index();
  const auto topk = static_cast<std::uint32_t>(args.context.topk);
  if (warp_index() == 0) return;
  if (warp_index() == kCountWarps - 1 && blockIdx.x == 0) write_arrivals(args, ready.shared);
#pragma unroll 1
  for (std::uint32_t token = chunk.begin + static_cast<std::uint32_t>(warp_index()) - 1;
       token < chunk.end; token += kCountWarps - 1) {
    const float weight = weight_of(args, token, lane);
    const Choice choice =
        place_token(args, ready.shared, ready.choices, ready.tokens_of_warp, token, lane);
    if (lane >= args.context.topk) continue;
    const std::uint32_t at = token * topk + static_cast<std::uint32_t>(lane);
    args.plan.slot[at] = ready.choices.slot[at];
    args.plan.dest[at] = choice.dest;
    args.plan.row[at] = choice.row;
    args.plan.token_row[at] = choice.token_row;
    args.plan.weight[at] = choice.row >= 0 ? weight : 0.0F;
    args.plan.repeat[at] = choice.repeat ? 1 : 0;
  }
}

// One step: what the last block of a rank advances, and tells.
struct Step {
  std::uint32_t plans;
  std::uint32_t epoch;  // of the dispatch
};
__device__ void signal(const PlanDispatchArgs& args, const CountShared& shared, const Step& step) {
  constexpr auto kChannel = static_cast<std::uint32_t>(layout::Channel::dispatch);
  const RankContext& context = args.count.context;
  signal_peers(context, layout::Channel::dispatch, args.send.generation, step.epoch,
               [&](int peer) { return static_cast<std::uint32_t>(shared.to[peer]); });
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

// One block: the counts of this rank to the peers that are this block's to tell.
__device__ void send_counts(const CountArgs& args, const CountShared& shared, const StageInfo& info,
                            int used_warps, int blocks, std::uint64_t bad) {
  const std::uint64_t message = args.context.layout.count_message(
      info.generation, static_cast<std::uint64_t>(args.context.rank));
  const int quads = shared.entries / 4;
  const int block = static_cast<int>(blockIdx.x);
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < quads + kHeaderPairs;
       i += static_cast<int>(blockDim.x)) {
    if (i < quads) {
      const int4 counts = sum_over_warps(shared, i, used_warps);
      tell_peers(args.context, message, kHeaderPairs + i, pack_quad(info.epoch, counts), block,
                 blocks);
    } else {
      tell_peers(args.context, message, i - quads, header_pair(args, info.epoch, i - quads, bad),
                 block, blocks);
    }
  }
}

template <bool kQuantised, bool kBulk>
__global__ void __launch_bounds__(kCountThreads)
    plan_dispatch(const __grid_constant__ RankTable<PlanDispatchArgs> table, int max_warps) {
  extern __shared__ __align__(128) std::byte plan_memory[];
  __shared__ unsigned long long bad;
  __shared__ unsigned flags;
  const PlanDispatchArgs& args = table.rank[blockIdx.y];
  const CountArgs& count = args.count;
  const RankContext& context = count.context;
  const auto tokens = static_cast<std::uint32_t>(count.plan.tokens);
  const int blocks = num_counting_blocks(count.plan.tokens, count.chunk_tokens);
  if (static_cast<int>(blockIdx.x) >= blocks) return;
  const auto chunk_tokens = static_cast<std::uint32_t>(count.chunk_tokens);
  const std::uint32_t first_token = min(blockIdx.x * chunk_tokens, tokens);
  const Chunk chunk{first_token, min(first_token + chunk_tokens, tokens)};
  touch_arguments(args, context);
  constexpr auto kChannel = static_cast<std::uint32_t>(layout::Channel::dispatch);
  const std::uint32_t sent = context.state->sent[kChannel][args.send.generation];
  const CountShared shared = count_shared(reinterpret_cast<std::int32_t*>(plan_memory), count);
  const CountSizes sizes{count.placement.experts, count.placement.slots, context.ranks};
  auto* at = plan_memory + count_bytes(sizes, max_warps);
  const std::size_t choices_of_each =
      static_cast<std::size_t>(tokens) * static_cast<std::size_t>(context.topk);
  auto* words = reinterpret_cast<std::int32_t*>(at);
  const ChoiceArrays choices{words, words + choices_of_each, words + 2 * choices_of_each,
                             words + 3 * choices_of_each};
  at += choice_bytes(count.plan.tokens, context.topk);
  const Staging staging{at, at + chunk_tokens * context.layout.row_pitch};

  const Run run = run_of_warp(0, tokens, context.topk, max_warps);
  const FirstIds first_ids = load_first_ids(count, run);
  load_placement(count, shared);
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < run.used_warps * shared.entries;
       i += kCountThreads) {
    shared.counts[i] = 0;
  }
  if (threadIdx.x == 0) {
    bad = kNoBadChoice;
    flags = 0;
  }
  const StageBegin begin = begin_stage(context, context.state->plans);
  if (begin.failed) return;
  prefetch_rows(args.send, chunk,
                static_cast<std::uint32_t>(context.layout.row_bytes) * (kQuantised ? 2U : 1U));
  const std::uint32_t plans = begin.epoch - 1;
  const StageInfo info{Stage::plan, layout::Channel::counts, plans % layout::kCountGenerations,
                       plans / layout::kCountGenerations + 1};
  count_run(count, shared, run, first_ids, choices, nullptr, &bad);
  __syncthreads();
  send_counts(count, shared, info, run.used_warps, blocks, bad);

  // Some rows are ready when the counts are: the others are made ready while those leave.
  const Ready ready{shared, choices, run.each, chunk.begin, staging};
  Placed placed = Placed::good;
  Chunk part{chunk.begin, min(chunk.begin + kPartTokens, chunk.end)};
#pragma unroll 1
  for (bool counted = false;; counted = true) {
    stage<kQuantised, kBulk>(args, part, chunk.begin, staging);
    if (!counted) {
      // Its barrier also says that these rows are staged and all warps' counts summed.
      placed = receive_counts(count, shared, info, begin.epoch, blockIdx.x == 0, &flags,
                              chunk.begin, chunk.end);
      if (placed == Placed::failed) return;
      if (placed == Placed::poisoned) break;
    } else {
      __syncthreads();
    }
    send_tokens<kBulk>(args, ready, part);
    if (part.end == chunk.end) break;
    part = {part.end, min(part.end + kPartTokens, chunk.end)};
  }
#ifdef WHERRY_HAS_BULK_COPY
  if constexpr (kBulk) bulk_wait_written();
#endif
  const Step step{plans, sent + 1};
  const bool last =
      is_last_block(*context.state, Arrival::dispatch_sent, static_cast<std::uint32_t>(blocks));
  if (last && warp_index() == 0) signal(args, shared, step);
  if (placed == Placed::good) {
    write_plan(count, ready, chunk);
    if (blockIdx.x == 0) add_loads(count, shared);
  }
  if (last && args.send.receive) wait(args, shared, step);
}

template <bool kQuantised, bool kBulk>
cudaError_t launch(const RankTable<PlanDispatchArgs>& table, int ranks,
                   const PlanDispatchShape& shape, cudaStream_t stream) {
  int blocks = 1;
  int tokens = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    const CountArgs& each = table.rank[rank].count;
    const int counting = num_counting_blocks(each.plan.tokens, each.chunk_tokens);
    blocks = counting > blocks ? counting : blocks;
    tokens = each.plan.tokens > tokens ? each.plan.tokens : tokens;
  }
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(ranks));
  plan_dispatch<kQuantised, kBulk><<<grid, kCountThreads, shape.shared_bytes, stream>>>(
      table, warps_that_count(tokens, table.rank[0].count.context.topk));
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
  shape.bulk = job.bulk && chunk >= kBulkTokens;
  shape.shared_bytes =
      count_bytes({job.experts, job.slots, job.ranks}, warps_that_count(job.tokens, job.topk)) +
      choice_bytes(job.tokens, job.topk) +
      static_cast<std::size_t>(chunk) *
          (layout::round_up(job.row_bytes, layout::kRowAlignment) + job.scale_pitch);
  const bool fits = job.row_bytes % 16 == 0 && job.tokens * job.topk <= kMaxChoices &&
                    shape.shared_bytes <= static_cast<std::size_t>(job.shared_bytes);
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
