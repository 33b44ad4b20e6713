// Stage 5, combine_recv where rows go home in another format than they have, and for rows of f64: waits,
// loads (what was pushed here, or from the peers), converts and sums, by the rules of combine_recv.cu.
#include "kernels/cuda/combine_partials.cuh"
#include "kernels/cuda/combine_stage.cuh"
#include "kernels/cuda/home_terms.cuh"
#include "kernels/cuda/items.cuh"
#include "kernels/cuda/launch.hpp"
#include "kernels/cuda/signals.cuh"

namespace wherry::kernels::cuda {

namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / kWarpLanes;

// One warp: the terms of a token in the order in which they are summed; returns how many.
__device__ int list_home_terms(const CombineRecvArgs& args, std::uint32_t token, HomeTerms& terms,
                               int lane) {
  const RankContext& context = args.context;
  const layout::WindowLayout& layout = context.layout;
  const bool of_ranks = args.sum == Sum::token_rows || args.sum == Sum::partials;
  const Choice choice = load_choice(args.plan, context.topk, token, lane);
  // A row that serves two choices was multiplied by both weights by experts that multiply.
  const bool counts = choice.row >= 0 && !(args.unweighted && choice.repeat);
  const std::int32_t dest = counts ? choice.dest : -1;
  const unsigned same_rank = __match_any_sync(kAllLanes, dest);
  const bool present = dest >= 0 && (!of_ranks || (same_rank & lanes_before(lane)) == 0);
  const unsigned lanes = __ballot_sync(kAllLanes, present);
  int order = __popc(lanes & lanes_before(lane));
  if (args.sum != Sum::choices) {
    order = __popc(lanes & same_rank & lanes_before(lane));
    for_each_lane(lanes,
                  [&](int other) { order += __shfl_sync(kAllLanes, dest, other) < dest ? 1 : 0; });
  }
  HomeTerm term{nullptr, nullptr, of_ranks || args.unweighted ? 1.0F : choice.weight,
                (same_rank >> lane) == 1U};
  if (present && args.sum == Sum::partials) {
    const std::uint64_t at = pushed_by(context, args.plan, dest, choice.token_row);
    term.row = own_window_at<std::byte>(context, layout.partial(args.generation, at));
    term.scales = own_window_at<std::byte>(context, layout.home_scale(args.generation, at));
  } else if (present) {
    const auto at = static_cast<std::uint64_t>(of_ranks ? choice.token_row : choice.row);
    term.row = window_at<std::byte>(context, dest, layout.result(args.generation, at));
    term.scales = window_at<std::byte>(context, dest, layout.home_scale(args.generation, at));
  }
  put_term(terms, present, order, term);
  return __popc(lanes);
}

// A lane's elements of the sum. A plain term has weight 1: multiplying by it changes no bit.
template <typename C>
__device__ void sum_terms(const CombineRecvArgs& args, const WireFormat& format,
                          const HomeTerms& terms, int count, std::uint32_t element,
                          typename C::Values& total) {
  const bool ranked = args.sum == Sum::ranked;
  typename C::Values sum{};
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    typename C::Values values;
    decode<C>(format, terms[i].row, scales_of_row(format, terms[i].scales, 1, 0), element, values);
    add_weighted<C>(sum, terms[i].weight, values);
    if (!ranked || !terms[i].last_of_rank) continue;
    // Only f64 rows come here, whose sums are of their own type: there is nothing to round.
    add<C>(total, sum);
    sum = {};
  }
  if (!ranked) total = sum;
}

// Returns Items::any_taken().
template <typename C>
__device__ bool sum_at_home(const CombineRecvArgs& args, const WireFormat& format,
                            std::uint32_t parts) {
  __shared__ HomeTerms terms[kWarps];
  const int lane = lane_index();
  HomeTerms& mine = terms[warp_index()];
  const auto hidden = static_cast<std::uint32_t>(format.hidden);
  const std::uint32_t row_bytes = hidden * bytes_of(args.dtype);
  const std::uint32_t pieces = num_pieces<C>(format);
  const std::uint32_t all = static_cast<std::uint32_t>(args.plan.tokens) * parts;
  Items items(*args.context.state, Arrival::combine_received, all,
              blockIdx.x * kWarps + static_cast<std::uint32_t>(warp_index()), gridDim.x * kWarps);
  for (std::uint32_t item = items.next(); item < all; item = items.next()) {
    const std::uint32_t token = item / parts;
    const int count = list_home_terms(args, token, mine, lane);
    for (std::uint32_t piece = item % parts; piece < pieces; piece += parts) {
      const std::uint32_t element =
          piece * C::kPieceElements + static_cast<std::uint32_t>(lane * C::kElements);
      if (element >= hidden) continue;
      typename C::Values total{};
      sum_terms<C>(args, format, mine, count, element, total);
      if (args.addend != nullptr) {
        const std::byte* row = args.addend + token * args.addend_pitch;
        typename C::Values last;
        widen_packed<C>(args.dtype, load_packed<C>(args.dtype, row, element, row_bytes), last);
        add<C>(total, last);
      }
      store_values<C>(args.dtype, args.out + token * args.out_pitch, element, row_bytes, total);
    }
  }
  return items.any_taken();
}

template <typename C>
__global__ void __launch_bounds__(kThreads)
    combine_recv_converted(const __grid_constant__ RankTable<CombineRecvArgs> table,
                           const __grid_constant__ WireFormat format, std::uint32_t parts) {
  constexpr auto kChannel = static_cast<std::uint32_t>(layout::Channel::combine);
  const CombineRecvArgs& args = table.rank[blockIdx.y];
  const RankContext& context = args.context;
  const StageBegin begin = begin_stage(context, context.state->received[kChannel][args.generation]);
  if (begin.failed) return;
  if (args.send && blockIdx.x == 0 && warp_index() == 0) {
    signal_results(context, args.plan, args.generation, begin.epoch);
  }
  const bool complete = wait_for_results(args, begin.epoch);
  if (!complete) return;
  const bool taken = sum_at_home<C>(args, format, parts);
  finish_combine_recv(args, begin.epoch, taken);
}

}  // namespace

cudaError_t launch_combine_recv_converted(const RankTable<CombineRecvArgs>& table, int ranks,
                                          const ConversionShape& shape, const WireFormat& format,
                                          cudaStream_t stream) {
  return with_codec(format, [&]<typename C>() {
    const dim3 grid(static_cast<unsigned>(shape.blocks), static_cast<unsigned>(ranks));
    combine_recv_converted<C>
        <<<grid, kThreads, 0, stream>>>(table, format, static_cast<std::uint32_t>(shape.parts));
    return cudaGetLastError();
  });
}

}  // namespace wherry::kernels::cuda
