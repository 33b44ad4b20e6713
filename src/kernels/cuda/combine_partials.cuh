// by_rank over a link: what a rank has of a peer's token is summed there and pushed into the peer's window
// (a pull would read the sum once more, and only after a signal that says it is there). Whose token it is, and
// where its sum goes.
#pragma once

#include <cstdint>

#include "kernels/cuda/choices.cuh"
#include "kernels/cuda/signals.cuh"
#include "kernels/cuda/token_rows.cuh"

namespace wherry::kernels::cuda {

// Where the sum of token row `row` goes.
struct Home {
  int peer;
  std::uint64_t at;  // which partial of the peer's window
};
// One warp.
__device__ inline Home home_of(const RankContext& context, const PlanArrays& plan,
                               std::uint32_t row, int lane) {
  std::uint32_t before = 0;
  for (int first = 0;; first += kWarpLanes) {
    const int peer = first + lane;
    const std::int32_t rows = peer < context.ranks ? plan.token_rows_from[peer] : 0;
    const std::uint32_t end = before + static_cast<std::uint32_t>(sum_up_to_lane(rows, lane));
    const unsigned behind = __ballot_sync(kAllLanes, row < end);
    if (behind != 0 || first + kWarpLanes >= context.ranks) {
      const int source = behind != 0 ? __ffs(static_cast<int>(behind)) - 1 : 0;
      const std::uint32_t begin =
          __shfl_sync(kAllLanes, end - static_cast<std::uint32_t>(rows), source);
      const int home = first + source;
      return {home, context.layout.pushed(static_cast<std::uint64_t>(context.rank), row - begin)};
    }
    before = __shfl_sync(kAllLanes, end, kWarpLanes - 1);
  }
}

// At home: where `peer` has put its sum of the token that is its token row `token_row`.
__device__ inline std::uint64_t pushed_by(const RankContext& context, const PlanArrays& plan,
                                          std::int32_t peer, std::int32_t token_row) {
  return context.layout.pushed(static_cast<std::uint64_t>(peer),
                               static_cast<std::uint64_t>(token_row - plan.token_row_begin[peer]));
}

}  // namespace wherry::kernels::cuda
