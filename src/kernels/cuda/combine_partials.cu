// Stage 5 by_rank over a link, both halves. combine_send: what this rank has of each token of a peer is summed
// and pushed into the peer's window (weights travelled with the rows), then one signal says so. combine_recv:
// waits for the peers' sums, and adds them to what this rank itself has of its tokens, ranks ascending.
#include "kernels/cuda/combine_partials.cuh"
#include "kernels/cuda/combine_stage.cuh"
#include "kernels/cuda/combine_terms.cuh"
#include "kernels/cuda/items.cuh"
#include "kernels/cuda/launch.hpp"
#include "kernels/cuda/overlap.cuh"
#include "kernels/cuda/row_parts.cuh"
#include "kernels/cuda/row_sum.cuh"
#include "kernels/cuda/signals.cuh"

namespace wherry::kernels::cuda {

namespace {

constexpr int kThreads = kMaxSumThreads;
constexpr int kWarps = kThreads / kWarpLanes;
constexpr auto kChannel = static_cast<std::uint32_t>(layout::Channel::combine);

__device__ std::uint32_t all_warps() { return gridDim.x * kWarps; }
__device__ SumTarget part_of(const RowParts& parts, std::uint32_t item, std::byte* row,
                             bool aligned, std::uint32_t row_bytes) {
  return {row, aligned, row_bytes, parts.begin(item), parts.end(item), nullptr};
}

// One warp: lists the results of this rank that its lanes have the places of, in the lanes' order; returns how many.
__device__ int put_own_terms(const RankContext& context, std::uint32_t generation, WarpTerms& terms,
                             const layout::TokenEntry& mine, int lane) {
  const bool present = mine.position >= 0;
  const unsigned lanes = __ballot_sync(kAllLanes, present);
  const std::byte* row =
      present ? own_window_at<std::byte>(
                    context,
                    context.layout.result(generation, static_cast<std::uint64_t>(mine.position)))
              : nullptr;
  put_term(terms, present, __popc(lanes & lanes_before(lane)),
           Term{row, mine.weight, OfRank::some});
  return __popc(lanes);
}

template <typename Element>
__device__ void push(const CombineRecvArgs& args, const TokenRows& rows, WarpTerms& terms) {
  const RankContext& context = args.context;
  const layout::WindowLayout& layout = context.layout;
  const int lane = lane_index();
  const RowParts parts(rows.count, layout.result_pitch, all_warps());
  Items items(*context.state, Arrival::combine_sent, parts.items, place_of_warp(gridDim.x),
              all_warps());
  for (std::uint32_t item = items.next(); item < parts.items; item = items.next()) {
    const std::uint32_t token_row = rows.row(parts.row(item));
    const layout::TokenEntry entry = load_entry(context, args.generation, token_row, lane);
    const Home home = home_of(context, args.plan, token_row, lane);
    const int count = put_own_terms(context, args.generation, terms, entry, lane);
    sum_rows<Element, Arithmetic::weighted, false, false>(
        terms, count,
        part_of(parts, item,
                window_at<std::byte>(context, home.peer, layout.partial(args.generation, home.at)),
                true, static_cast<std::uint32_t>(layout.result_bytes)),
        lane);
  }
}

// A warp's first item, while the peers' sums are on their way: what this rank itself has of it, so that one row
// of each rank is left to add. Returns where it is stored, or null if there is nothing. Each lane will load what
// it has stored.
template <typename Element>
__device__ const std::byte* sum_own(const CombineRecvArgs& args, WarpTerms& terms,
                                    const RowParts& parts, const Source& source) {
  const RankContext& context = args.context;
  const layout::WindowLayout& layout = context.layout;
  const std::uint32_t item = place_of_warp(gridDim.x);
  const int lane = lane_index();
  const bool present = item < parts.items && source.dest == context.rank;
  const int count = put_own_terms(context, args.generation, terms,
                                  {present ? source.row : -1, source.weight}, lane);
  if (count == 0) return nullptr;
  auto* sum = own_window_at<std::byte>(
      context,
      layout.partial(args.generation,
                     layout.pushed(static_cast<std::uint64_t>(context.rank), parts.row(item))));
  sum_rows<Element, Arithmetic::weighted, false, false>(
      terms, count,
      part_of(parts, item, sum, true, static_cast<std::uint32_t>(layout.result_bytes)), lane);
  return sum;
}

// Returns Items::any_taken().
template <typename Element, bool kAddend>
__device__ bool sum_tokens(const CombineRecvArgs& args, WarpTerms& terms, const RowParts& parts,
                           Source next, const std::byte* own_sum) {
  const int lane = lane_index();
  const auto row_bytes = static_cast<std::uint32_t>(args.context.layout.result_bytes);
  const bool aligned = out_aligned(args);
  Items items(*args.context.state, Arrival::combine_received, parts.items, place_of_warp(gridDim.x),
              all_warps());
  std::uint32_t item = items.next();
  while (item < parts.items) {
    const std::uint32_t coming = items.next();
    const std::uint32_t token = parts.row(item);
    const LaneTerm mine = find_term<Sum::partials>(args, next, lane, own_sum);
    own_sum = nullptr;
    put_term(terms, mine.present, mine.order, mine.term);
    next = load_source<Sum::partials>(args, parts.row(coming), lane);
    SumTarget target = part_of(parts, item, args.out + token * args.out_pitch, aligned, row_bytes);
    if constexpr (kAddend) target.addend = args.addend + token * args.addend_pitch;
    sum_rows<Element, Arithmetic::ranked, false, kAddend>(terms, __popc(mine.lanes), target, lane);
    item = coming;
  }
  return items.any_taken();
}

template <typename Element, bool kAddend>
__global__ void __launch_bounds__(kThreads, 1)
    combine_partials(const __grid_constant__ RankTable<CombineRecvArgs> table) {
  __shared__ WarpTerms terms[kWarps];
  const CombineRecvArgs& args = table.rank[blockIdx.y];
  const RankContext& context = args.context;
  WarpTerms& mine = terms[warp_index()];
  touch_arguments(args, context);
  wait_for_earlier_kernels();
  RankState& state = *context.state;
  // What comes from far is asked for before anything waits: here, and before the peers' sums.
  const StageLook look =
      look_at_stage(context, args.send ? state.sent[kChannel][args.generation]
                                       : state.received[kChannel][args.generation]);
  const TokenRows rows = token_rows(context, args.plan.token_rows_from, false, lane_index());
  const StageBegin begin = begin_stage(context, look);
  if (begin.failed) return;
  if (args.overlaps) let_next_kernel_begin();
  if (args.send) {
    push<Element>(args, rows, mine);
    if (is_last_block(state, Arrival::combine_sent, gridDim.x)) {
      if (warp_index() == 0) signal_results(context, args.plan, args.generation, begin.epoch);
      if (threadIdx.x == 0 && !args.receive) state.sent[kChannel][args.generation] = begin.epoch;
    }
  }
  if (!args.receive) return;
  const RowParts parts(static_cast<std::uint32_t>(args.plan.tokens), context.layout.result_pitch,
                       all_warps());
  const Source source =
      load_source<Sum::partials>(args, parts.row(place_of_warp(gridDim.x)), lane_index());
  const std::byte* own_sum = sum_own<Element>(args, mine, parts, source);
  if (!wait_for_results(args, begin.epoch)) return;
  const bool taken = sum_tokens<Element, kAddend>(args, mine, parts, source, own_sum);
  finish_combine_recv(args, begin.epoch, taken);
}

template <typename Element>
cudaError_t launch(const RankTable<CombineRecvArgs>& table, int ranks, int blocks,
                   cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(ranks));
  const bool overlaps = table.rank[0].overlaps;
  switch (addends_of(table, ranks)) {
    case Addends::none:
      return launch_kernel(overlaps, combine_partials<Element, false>, grid, kThreads, 0, stream,
                           table);
    case Addends::all:
      return launch_kernel(overlaps, combine_partials<Element, true>, grid, kThreads, 0, stream,
                           table);
    case Addends::differ: break;
  }
  return cudaErrorInvalidValue;
}

template <typename Element>
cudaError_t load_kernels() {
  cudaFuncAttributes attributes;
  const cudaError_t plain = cudaFuncGetAttributes(&attributes, combine_partials<Element, false>);
  if (plain != cudaSuccess) return plain;
  return cudaFuncGetAttributes(&attributes, combine_partials<Element, true>);
}

}  // namespace

cudaError_t launch_combine_partials(const RankTable<CombineRecvArgs>& table, int ranks, int blocks,
                                    cudaStream_t stream) {
  return with_element(table.rank[0].dtype, [&]<typename Element>() {
    return launch<Element>(table, ranks, blocks, stream);
  });
}

cudaError_t prepare_combine_partials() {
  for (const cudaError_t each :
       {load_kernels<Bf16Element>(), load_kernels<F16Element>(), load_kernels<F32Element>()}) {
    if (each != cudaSuccess) return each;
  }
  return cudaSuccess;
}

}  // namespace wherry::kernels::cuda
