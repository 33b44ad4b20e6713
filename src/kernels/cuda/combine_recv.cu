// Stage 5, combine_recv: waits until every peer's results can be read, pulls each token's rows by
// 16-byte streaming loads, 8 to 16 in flight a lane, and sums them at home.
#include "kernels/cuda/choices.cuh"
#include "kernels/cuda/launch.hpp"
#include "kernels/cuda/row_sum.cuh"
#include "kernels/cuda/signals.cuh"

namespace wherry::kernels::cuda {

namespace {

constexpr int kExactThreads = 512;  // twice the registers of kMaxSumThreads

// What a lane needs of its choice; loaded one token ahead, so kept small.
struct Source {
  std::int32_t dest;
  std::int32_t row;
  float weight;
};
template <Arithmetic kArithmetic>
__device__ Source load_source(const CombineRecvArgs& args, std::uint32_t token, int lane) {
  const Choice choice = load_choice(args.plan, args.context.topk, token, lane);
  // A row that serves two choices was multiplied by both weights by experts that multiply.
  const bool counts = choice.row >= 0 && !(args.unweighted && choice.repeat);
  const std::int32_t dest = counts ? choice.dest : -1;
  if constexpr (kArithmetic == Arithmetic::plain) return {dest, choice.token_row, 1.0F};
  return {dest, choice.row, args.unweighted ? 1.0F : choice.weight};
}

// One warp: lists the terms of a token in the order in which they are summed; returns how many.
// plain: one for each rank, ranks ascending; ranked: each choice, ranks and then k ascending;
// weighted: each choice, k ascending.
template <Arithmetic kArithmetic>
__device__ int list_terms(const CombineRecvArgs& args, const Source& source, WarpTerms& terms,
                          int lane) {
  const RankContext& context = args.context;
  const layout::WindowLayout& layout = context.layout;
  const unsigned same_rank = __match_any_sync(kAllLanes, source.dest);
  const bool first_of_rank = (same_rank & lanes_before(lane)) == 0;
  const bool present = source.dest >= 0 && (kArithmetic != Arithmetic::plain || first_of_rank);
  const unsigned lanes = __ballot_sync(kAllLanes, present);
  int order = __popc(lanes & lanes_before(lane));
  if constexpr (kArithmetic != Arithmetic::weighted) {
    order = __popc(lanes & same_rank & lanes_before(lane));
    for_each_lane(lanes, [&](int other) {
      order += __shfl_sync(kAllLanes, source.dest, other) < source.dest ? 1 : 0;
    });
  }
  const std::byte* row = nullptr;
  if (present) {
    const auto at = static_cast<std::uint64_t>(source.row);
    row = window_at<std::byte>(context, source.dest,
                               args.sum == Sum::partials ? layout.partial(args.generation, at)
                                                         : layout.result(args.generation, at));
  }
  const bool last_of_rank = (same_rank >> lane) == 1U;
  put_term(terms, present, order, {row, source.weight, last_of_rank ? 1 : 0});
  return __popc(lanes);
}

// An item is (token, part): with few tokens several warps share one.
template <typename Element, Arithmetic kArithmetic, int kThreads, bool kAddend>
__device__ void sum_tokens(const CombineRecvArgs& args, WarpTerms* terms, std::uint32_t parts) {
  constexpr int kWarps = kThreads / kWarpLanes;
  const RankContext& context = args.context;
  const int lane = lane_index();
  const int warp = warp_index();
  const auto row_bytes = static_cast<std::uint32_t>(context.layout.result_bytes);
  const auto vectors = static_cast<std::uint32_t>(context.layout.result_pitch / sizeof(uint4));
  const std::uint32_t part_vectors = (vectors + parts - 1) / parts;
  const bool aligned = row_bytes % sizeof(uint4) == 0 && args.out_pitch % sizeof(uint4) == 0 &&
                       reinterpret_cast<std::uintptr_t>(args.out) % sizeof(uint4) == 0;
  const std::uint32_t items = static_cast<std::uint32_t>(args.plan.tokens) * parts;
  const std::uint32_t stride = gridDim.x * kWarps;
  std::uint32_t item = blockIdx.x * kWarps + static_cast<std::uint32_t>(warp);
  Source next = load_source<kArithmetic>(args, item / parts, lane);
  for (; item < items; item += stride) {
    const int count = list_terms<kArithmetic>(args, next, terms[warp], lane);
    next = load_source<kArithmetic>(args, (item + stride) / parts, lane);
    const std::uint32_t first = item % parts * part_vectors;
    const SumTarget target{args.out + item / parts * args.out_pitch,
                           aligned,
                           row_bytes,
                           first,
                           min(first + part_vectors, vectors),
                           kAddend ? args.addend + item / parts * args.addend_pitch : nullptr};
    sum_rows<Element, kArithmetic, kThreads <= kExactThreads, kAddend>(terms[warp], count, target,
                                                                       lane);
  }
}

template <typename Element, Arithmetic kArithmetic, int kThreads, bool kAddend>
__global__ void __launch_bounds__(kThreads, 1)
    combine_recv(const __grid_constant__ RankTable<CombineRecvArgs> table, std::uint32_t parts) {
  constexpr auto kChannel = static_cast<std::uint32_t>(layout::Channel::combine);
  __shared__ WarpTerms terms[kThreads / kWarpLanes];
  const CombineRecvArgs& args = table.rank[blockIdx.y];
  const RankContext& context = args.context;
  touch_arguments(args, context);
  RankState& state = *context.state;
  std::uint32_t& received = state.received[kChannel][args.generation];
  const StageBegin begin = begin_stage(context, received);
  if (begin.failed) return;
  const StageInfo info{Stage::combine_recv, layout::Channel::combine, args.generation, begin.epoch};
  if (args.send && blockIdx.x == 0 && warp_index() == 0) {
    signal_peers(context, layout::Channel::combine, args.generation, begin.epoch, [&](int peer) {
      return static_cast<std::uint32_t>(args.plan.token_rows_from[peer]);
    });
  }
  const bool complete = wait_for_peers(
      context, info, [&](int peer) { return std::int64_t{args.plan.token_rows_to[peer]}; });
  if (!complete) return;
  sum_tokens<Element, kArithmetic, kThreads, kAddend>(args, terms, parts);
  if (threadIdx.x == 0 && is_last_to_leave(state, Arrival::combine_received, gridDim.x)) {
    received = begin.epoch;
    if (args.send) state.sent[kChannel][args.generation] = begin.epoch;
  }
}

template <typename Element, Arithmetic kArithmetic, int kThreads, bool kAddend>
cudaError_t launch(const RankTable<CombineRecvArgs>& table, int ranks, const CombineShape& shape,
                   cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(shape.blocks), static_cast<unsigned>(ranks));
  combine_recv<Element, kArithmetic, kThreads, kAddend>
      <<<grid, kThreads, 0, stream>>>(table, static_cast<std::uint32_t>(shape.parts));
  return cudaGetLastError();
}

template <typename Element, bool kAddend>
cudaError_t launch_rows_of(const RankTable<CombineRecvArgs>& table, int ranks,
                           const CombineShape& shape, cudaStream_t stream) {
  switch (table.rank[0].sum) {
    case Sum::token_rows:
    case Sum::partials:
      if constexpr (!kAddend) {
        if (shape.threads == kExactThreads) {
          return launch<Element, Arithmetic::plain, kExactThreads, false>(table, ranks, shape,
                                                                          stream);
        }
      }
      return launch<Element, Arithmetic::plain, kMaxSumThreads, kAddend>(table, ranks, shape,
                                                                         stream);
    case Sum::ranked:
      return launch<Element, Arithmetic::ranked, kMaxSumThreads, kAddend>(table, ranks, shape,
                                                                          stream);
    case Sum::choices:
      return launch<Element, Arithmetic::weighted, kMaxSumThreads, kAddend>(table, ranks, shape,
                                                                            stream);
  }
  return cudaErrorInvalidValue;
}

// All ranks of a launch that have tokens have an addend, or none.
template <typename Element>
cudaError_t launch_sums_of(const RankTable<CombineRecvArgs>& table, int ranks,
                           const CombineShape& shape, cudaStream_t stream) {
  int with = 0;
  int without = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    if (table.rank[rank].plan.tokens == 0) continue;
    ++(table.rank[rank].addend != nullptr ? with : without);
  }
  if (with > 0 && without > 0) return cudaErrorInvalidValue;
  return with > 0 ? launch_rows_of<Element, true>(table, ranks, shape, stream)
                  : launch_rows_of<Element, false>(table, ranks, shape, stream);
}

}  // namespace

CombineShape choose_combine_shape(const CombineJob& job) {
  // Few rows a token: fewer threads with more loads each keep more bytes in flight (4 ranks x 16 SMs:
  // 315 -> 288 us). With more rows that is slower as one process a rank (8 x 16: 748 -> 1041 us).
  const bool plain = job.sum == Sum::token_rows || job.sum == Sum::partials;
  const int threads = plain && job.copies < 4.5 ? kExactThreads : kMaxSumThreads;
  // Each part is at least one load a lane; more parts only while there are warps without work.
  const std::int64_t warps = std::int64_t{job.num_sms} * threads / kWarpLanes;
  const auto most = static_cast<std::int64_t>((job.row_bytes + 511) / 512);
  const std::int64_t wanted = job.tokens > 0 ? (warps + job.tokens - 1) / job.tokens : 1;
  return {job.num_sms, static_cast<int>(wanted < most ? wanted : most), threads};
}

cudaError_t launch_combine_recv(const RankTable<CombineRecvArgs>& table, int ranks,
                                const CombineShape& shape, cudaStream_t stream) {
  switch (table.rank[0].dtype) {
    case DType::bf16: return launch_sums_of<Bf16Element>(table, ranks, shape, stream);
    case DType::f16: return launch_sums_of<F16Element>(table, ranks, shape, stream);
    case DType::f32: return launch_sums_of<F32Element>(table, ranks, shape, stream);
    case DType::f64:
    case DType::raw: break;
  }
  return cudaErrorInvalidValue;
}

}  // namespace wherry::kernels::cuda
