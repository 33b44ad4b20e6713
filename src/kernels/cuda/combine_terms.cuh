// Which rows make up a token's sum at home, and in which order they are added: what both ways to load
// them share.
#pragma once

#include <cstdint>

#include "kernels/cuda/combine_partials.cuh"
#include "kernels/cuda/row_sum.cuh"

namespace wherry::kernels::cuda {

WHERRY_HD constexpr Arithmetic arithmetic_of(Sum sum) {
  if (sum == Sum::token_rows) return Arithmetic::plain;
  return sum == Sum::choices ? Arithmetic::weighted : Arithmetic::ranked;
}

// What a lane needs of its choice; loaded one token ahead, so kept small.
struct Source {
  std::int32_t dest;
  std::int32_t row;  // of its results; Sum::partials, of other ranks: the partial here
  float weight;
};
template <Sum kSum>
__device__ Source source_of(const CombineRecvArgs& args, const Choice& choice) {
  // A row that serves two choices was multiplied by both weights by experts that multiply.
  const bool counts = choice.row >= 0 && !(args.unweighted && choice.repeat);
  const std::int32_t dest = counts ? choice.dest : -1;
  if constexpr (kSum == Sum::token_rows) return {dest, choice.token_row, 1.0F};
  if (kSum == Sum::partials && counts && dest != args.context.rank) {
    return {dest,
            static_cast<std::int32_t>(pushed_by(args.context, args.plan, dest, choice.token_row)),
            1.0F};
  }
  return {dest, choice.row, args.unweighted ? 1.0F : choice.weight};
}
template <Sum kSum>
__device__ Source load_source(const CombineRecvArgs& args, std::uint32_t token, int lane) {
  return source_of<kSum>(args, load_choice(args.plan, args.context.topk, token, lane));
}

// This lane's term of a token. `lanes` is the same in all lanes.
struct LaneTerm {
  unsigned lanes;  // that have one
  bool present;
  int order;  // its place in the sum
  Term term;
};

// One warp: the terms of a token in the order in which they are summed.
// token_rows: one for each rank, ranks ascending; ranked: each choice, ranks and then k ascending;
// partials: the same, but one for each other rank, and one for this rank if its part is summed already, at
// `own_sum`; choices: each choice, k ascending.
template <Sum kSum>
__device__ LaneTerm find_term(const CombineRecvArgs& args, const Source& source, int lane,
                              const std::byte* own_sum = nullptr) {
  const RankContext& context = args.context;
  const layout::WindowLayout& layout = context.layout;
  const unsigned same_rank = __match_any_sync(kAllLanes, source.dest);
  const bool first_of_rank = (same_rank & lanes_before(lane)) == 0;
  const bool own = source.dest == context.rank;
  const bool one_of_rank =
      kSum == Sum::token_rows || (kSum == Sum::partials && (!own || own_sum != nullptr));
  const bool present = source.dest >= 0 && (!one_of_rank || first_of_rank);
  const unsigned lanes = __ballot_sync(kAllLanes, present);
  int order = __popc(lanes & lanes_before(lane));
  if constexpr (kSum != Sum::choices) {
    order = __popc(lanes & same_rank & lanes_before(lane));
    for_each_lane(lanes, [&](int other) {
      order += __shfl_sync(kAllLanes, source.dest, other) < source.dest ? 1 : 0;
    });
  }
  const std::byte* row = nullptr;
  if (kSum == Sum::partials && own && own_sum != nullptr) {
    row = own_sum;
  } else if (present) {
    const auto at = static_cast<std::uint64_t>(source.row);
    if constexpr (kSum == Sum::partials) {
      row = own_window_at<std::byte>(
          context, own ? layout.result(args.generation, at) : layout.partial(args.generation, at));
    } else {
      row = window_at<std::byte>(context, source.dest, layout.result(args.generation, at));
    }
  }
  const OfRank of_rank = one_of_rank                 ? OfRank::whole
                         : (same_rank >> lane) == 1U ? OfRank::last
                                                     : OfRank::some;
  return {lanes, present, order, {row, source.weight, of_rank}};
}

}  // namespace wherry::kernels::cuda
