// Stage 2, plan: counts every rank's rows, tells them to all ranks, and places each row.
//   within[choice] = rows before it in its block's run; blocks exchange their counts; totals to every
//   peer; within += rows of earlier blocks; when all have told, row = base + within.
// Nothing in it waits for a signal: all that is exchanged are words that carry their epoch. So with
// few tokens one block does it all, and with many no block waits for the last one.
#include "kernels/cuda/counting.cuh"
#include "kernels/cuda/launch.hpp"
#include "kernels/cuda/placing.cuh"

namespace wherry::kernels::cuda {

namespace {

// A block's message to the other blocks of its rank: the first bad choice, then the quads. All blocks
// of the workspace write theirs whenever several count, so every word holds the epoch before.
constexpr int kBlockHeaderPairs = 1;
__host__ __device__ constexpr int block_pairs(int slots, int ranks) {
  return kBlockHeaderPairs + count_quads(slots, ranks);
}
__device__ WordPair* block_message(const CountArgs& args, int block) {
  const int pairs = block_pairs(args.placement.slots, args.context.ranks);
  return reinterpret_cast<WordPair*>(args.workspace) + block * pairs;
}

// Tokens [begin, end) of a block.
struct Chunk {
  std::uint32_t begin, end;
};
__device__ Chunk chunk_of(const CountArgs& args, int block) {
  const auto tokens = static_cast<std::uint32_t>(args.plan.tokens);
  const auto chunk = static_cast<std::uint32_t>(args.chunk_tokens);
  const std::uint32_t begin = min(static_cast<std::uint32_t>(block) * chunk, tokens);
  return {begin, min(begin + chunk, tokens)};
}

// One thread a pair, this block's own in `mine`: the sum over all blocks; `before`: over earlier ones.
// For the header pair the smallest instead.
struct OverBlocks {
  int4 before;
  int4 total;
  std::uint64_t bad;
  bool failed;
};
__device__ OverBlocks sum_over_blocks(const CountArgs& args, const StageInfo& info, int pair,
                                      const WordPair& mine, int blocks) {
  // `info` is about the rank's blocks: its epoch is theirs.
  constexpr int kInFlight = 8;
  const int block = static_cast<int>(blockIdx.x);
  OverBlocks sum{{0, 0, 0, 0}, {0, 0, 0, 0}, kNoBadChoice, false};
  WordPair earlier{0, 0};
  WordPair all{0, 0};
  store_pair_system(block_message(args, block) + pair, mine);
  const std::uint64_t stride =
      static_cast<std::uint64_t>(block_pairs(args.placement.slots, args.context.ranks)) *
      sizeof(WordPair);
  for (int first = 0; first < blocks; first += kInFlight) {
    WordPair pairs[kInFlight];
    const auto* from = reinterpret_cast<const std::byte*>(block_message(args, first) + pair);
    if (!receive_pairs(args.context, info, from, stride, min(kInFlight, blocks - first),
                       args.context.rank, 0, pairs)) {
      sum.failed = true;
      return sum;
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (first + i >= blocks) continue;
      const WordPair data = data_of(pairs[i]);
      if (first + i < block) add_to(earlier, data);
      add_to(all, data);
      sum.bad = min(sum.bad, data.first);
    }
  }
  sum.before = unpack_quad(earlier);
  sum.total = unpack_quad(all);
  return sum;
}

// One block, all threads. Afterwards base[entry] holds the rows of earlier blocks. False: a wait
// failed.
__device__ bool exchange_counts(const CountArgs& args, const CountShared& shared,
                                const StageInfo& info, const StageInfo& among_blocks,
                                int used_warps, int blocks, std::uint64_t bad) {
  const int block = static_cast<int>(blockIdx.x);
  const std::uint64_t message = args.context.layout.count_message(
      info.generation, static_cast<std::uint64_t>(args.context.rank));
  int failed = 0;
  const int quads = shared.entries / 4;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i <= quads; i += static_cast<int>(blockDim.x)) {
    const bool is_header = i == quads;
    OverBlocks sum{{0, 0, 0, 0}, {0, 0, 0, 0}, bad, false};
    if (!is_header) sum.total = sum_over_warps(shared, i, used_warps);
    if (blocks > 1) {
      const WordPair mine =
          is_header ? WordPair{pack_word(among_blocks.epoch, bad), pack_word(among_blocks.epoch, 0)}
                    : pack_quad(among_blocks.epoch, sum.total);
      const int pair = is_header ? 0 : kBlockHeaderPairs + i;
      sum = sum_over_blocks(args, among_blocks, pair, mine, blocks);
      failed |= sum.failed ? 1 : 0;
      if (sum.failed) break;
    }
    if (is_header) {
      for (int which = 0; which < kHeaderPairs; ++which) {
        tell_peers(args.context, message, which, header_pair(args, info.epoch, which, sum.bad),
                   block, blocks);
      }
    } else {
      tell_peers(args.context, message, kHeaderPairs + i, pack_quad(info.epoch, sum.total), block,
                 blocks);
      reinterpret_cast<int4*>(shared.base)[i] = sum.before;
    }
  }
  return __syncthreads_or(failed) == 0;
}

// Each warp, for the tokens it has counted: rows of earlier warps and blocks.
__device__ void add_earlier(const CountArgs& args, const CountShared& shared, const Run& run) {
  const int topk = args.context.topk;
  const int lane = lane_index();
  const auto step = static_cast<std::uint32_t>(tokens_per_step(topk));
  const std::int32_t* warps = shared.counts + warp_index() * shared.entries;
#pragma unroll 2
  for (std::uint32_t token = run.begin; token < run.end; token += step) {
    const StepLane mine = lane_of_step(token, run.end, topk, lane);
    if (!mine.exists) continue;
    const std::int32_t slot = args.plan.slot[mine.at];  // this lane wrote it
    const float weight = args.weights != nullptr ? args.weights[mine.at] : 1.0F;
    args.plan.weight[mine.at] = slot >= 0 ? weight : 0.0F;
    if (slot < 0) continue;
    const std::int32_t rank = args.placement.slots + args.plan.dest[mine.at];
    args.plan.row[mine.at] += warps[slot] + shared.base[slot];
    args.plan.token_row[mine.at] += warps[rank] + shared.base[rank];
  }
}

__device__ void add_base(const CountArgs& args, const CountShared& shared, const Chunk& chunk) {
  const auto topk = static_cast<std::uint32_t>(args.context.topk);
#pragma unroll 2
  for (std::uint32_t at = chunk.begin * topk + threadIdx.x; at < chunk.end * topk;
       at += blockDim.x) {
    const std::int32_t slot = args.plan.slot[at];
    if (slot < 0) continue;
    const std::int32_t row = args.plan.row[at] + shared.base[slot];
    const bool dropped = args.drops && row >= shared.end[slot];
    args.plan.row[at] = dropped ? -1 : row;
    if (dropped) args.plan.weight[at] = 0.0F;
    args.plan.token_row[at] += shared.base[args.placement.slots + args.plan.dest[at]];
  }
}

__global__ void __launch_bounds__(kCountThreads)
    count(const __grid_constant__ RankTable<CountArgs> table, int max_warps) {
  extern __shared__ __align__(16) std::int32_t memory[];
  __shared__ unsigned long long bad;
  __shared__ unsigned flags;
  const CountArgs& args = table.rank[blockIdx.y];
  const RankContext& context = args.context;
  const int blocks =
      num_counting_blocks(args.plan.tokens, args.chunk_tokens) > 1 ? args.workspace_blocks : 1;
  if (static_cast<int>(blockIdx.x) >= blocks) return;
  touch_arguments(args, context);
  const CountShared shared = count_shared(memory, args);
  const Chunk chunk = chunk_of(args, static_cast<int>(blockIdx.x));
  const Run run = run_of_warp(chunk.begin, chunk.end, context.topk, max_warps);
  const FirstIds first_ids = load_first_ids(args, run);
  store_placement(args, shared, load_placement_part(args, static_cast<int>(threadIdx.x)));
#pragma unroll 1
  for (int at = static_cast<int>(threadIdx.x); at < run.used_warps * shared.entries;
       at += kCountThreads) {
    shared.counts[at] = 0;
  }
  if (threadIdx.x == 0) {
    bad = kNoBadChoice;
    flags = 0;
  }
  RankState& state = *context.state;
  const std::uint32_t shared_plans = state.shared_plans;
  const StageBegin begin = begin_stage(context, state.plans);
  if (begin.failed) return;
  const std::uint32_t plans = begin.epoch - 1;
  const StageInfo info{Stage::plan, layout::Channel::counts, plans % layout::kCountGenerations,
                       plans / layout::kCountGenerations + 1};
  count_run(args, shared, run, first_ids,
            {args.plan.slot, args.plan.dest, args.plan.row, args.plan.token_row}, args.plan.repeat,
            &bad);
  __syncthreads();
  const StageInfo among_blocks{info.stage, info.channel, info.generation, shared_plans + 1};
  if (!exchange_counts(args, shared, info, among_blocks, run.used_warps, blocks, bad)) return;
  add_earlier(args, shared, run);
  __syncthreads();  // base is written again
  const bool writes = blockIdx.x == 0;
  receive_counts(args, shared, info, warp_index(), kCountWarps, &flags);
  switch (finish_counts(args, shared, info, begin.epoch, writes, &flags, chunk.begin, chunk.end)) {
    case Placed::failed: return;
    case Placed::poisoned: break;
    case Placed::good:
      if (writes && warp_index() == 0) write_arrivals(args, shared);
      if (writes) add_loads(args, shared, 0);
      add_base(args, shared, chunk);
  }
  if (threadIdx.x == 0 &&
      is_last_to_leave(state, Arrival::planned, static_cast<std::uint32_t>(blocks))) {
    state.plans = plans + 1;
    if (blocks > 1) state.shared_plans = shared_plans + 1;
  }
}

}  // namespace

cudaError_t launch_count(const RankTable<CountArgs>& table, int ranks, int shared_bytes,
                         cudaStream_t stream) {
  const CountArgs& args = table.rank[0];
  const CountSizes sizes{args.placement.experts, args.placement.slots, args.context.ranks};
  const int fixed_bytes = sizes.fixed() * static_cast<int>(sizeof(std::int32_t));
  const int warp_bytes = sizes.entries() * static_cast<int>(sizeof(std::int32_t));
  int blocks = 1;
  int most_tokens = 1;
  for (int rank = 0; rank < ranks; ++rank) {
    const CountArgs& each = table.rank[rank];
    const bool several = num_counting_blocks(each.plan.tokens, each.chunk_tokens) > 1;
    if (several && each.workspace_blocks > blocks) blocks = each.workspace_blocks;
    most_tokens = each.chunk_tokens > most_tokens ? each.chunk_tokens : most_tokens;
  }
  const int step = kWarpLanes / args.context.topk;
  int warps = (most_tokens + step - 1) / step;
  if (warps > kCountWarps) warps = kCountWarps;
  if (warps > (shared_bytes - fixed_bytes) / warp_bytes)
    warps = (shared_bytes - fixed_bytes) / warp_bytes;
  if (warps < 1) return cudaErrorInvalidConfiguration;
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(ranks));
  const auto dynamic_bytes = static_cast<std::size_t>(fixed_bytes + warps * warp_bytes);
  count<<<grid, kCountThreads, dynamic_bytes, stream>>>(table, warps);
  return cudaGetLastError();
}

int choose_chunk_tokens(int tokens, int blocks, int topk) {
  const int two_steps = 2 * kCountWarps * (kWarpLanes / topk);
  const int even = (tokens + blocks - 1) / blocks;
  return even > two_steps ? even : two_steps;
}

std::size_t count_workspace_bytes(int blocks, int slots, int ranks) {
  return static_cast<std::size_t>(blocks) * static_cast<std::size_t>(block_pairs(slots, ranks)) *
         sizeof(WordPair);
}

bool plan_fits(int experts, int slots, int ranks, int shared_bytes) {
  const CountSizes sizes{experts, slots, ranks};
  return (sizes.fixed() + sizes.entries()) * static_cast<int>(sizeof(std::int32_t)) <= shared_bytes;
}

cudaError_t shared_bytes_of_block(int& bytes) {
  constexpr int kStatic = 4 * 1024;
  int device = 0;
  int most = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  }
  bytes = most - kStatic;
  return error;
}

cudaError_t prepare_count() {
  int bytes = 0;
  const cudaError_t asked = shared_bytes_of_block(bytes);
  if (asked != cudaSuccess) return asked;
  return cudaFuncSetAttribute(count, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

}  // namespace wherry::kernels::cuda
