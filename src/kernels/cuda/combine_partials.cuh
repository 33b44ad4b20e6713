// by_rank over a link: what a rank has of a peer's token is summed there and pushed into the peer's window
// (a pull would read the sum once more, and only after a signal that says it is there). Whose token it is, and
// where its sum goes.
#pragma once

#include <cstdint>

#include "kernels/cuda/choices.cuh"
#include "kernels/cuda/signals.cuh"

namespace wherry::kernels::cuda {

// The token rows of this rank whose sums it pushes, in the order in which it does: those of the next rank
// first, so that not all ranks write to the same one, and its own last or not at all.
struct PushedRows {
  std::uint32_t first;
  std::uint32_t all;
  std::uint32_t count;

  [[nodiscard]] __device__ std::uint32_t row(std::uint32_t number) const {
    const std::uint32_t row = first + number;
    return row < all ? row : row - all;
  }
};
// One warp. own: also those of this rank's tokens.
__device__ inline PushedRows pushed_rows(const RankContext& context, const PlanArrays& plan,
                                         bool own, int lane) {
  std::uint32_t before = 0;
  for (int peer = lane; peer <= context.rank; peer += kWarpLanes) {
    before += static_cast<std::uint32_t>(plan.token_rows_from[peer]);
  }
  const auto all = static_cast<std::uint32_t>(plan.totals[kTokenRowsReceived]);
  const auto mine = static_cast<std::uint32_t>(plan.token_rows_from[context.rank]);
  return {__reduce_add_sync(kAllLanes, before), all, own ? all : all - mine};
}

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

// This lane's choice of a token row: the row of its result, or -1, and its weight.
__device__ inline layout::TokenEntry load_entry(const RankContext& context,
                                                std::uint32_t generation, std::uint32_t token_row,
                                                int lane) {
  layout::TokenEntry entry{-1, 0.0F};
  if (lane < context.topk) {
    entry = own_window_at<layout::TokenEntry>(
        context, context.layout.token_entries(generation, token_row))[lane];
  }
  return entry;
}

}  // namespace wherry::kernels::cuda
