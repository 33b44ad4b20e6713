// The token rows that a rank has received: one for each (token, rank), with a record of the token's choices here.
#pragma once

#include <cstdint>

#include "kernels/cuda/choices.cuh"
#include "kernels/cuda/signals.cuh"

namespace wherry::kernels::cuda {

// In the order in which they are gone through: those of the next rank first, so that not all ranks write to the
// same one, and those of this rank's own tokens last or not at all.
struct TokenRows {
  std::uint32_t first;
  std::uint32_t all;
  std::uint32_t count;

  [[nodiscard]] __device__ std::uint32_t row(std::uint32_t number) const {
    const std::uint32_t row = first + number;
    return row < all ? row : row - all;
  }
};
// One warp. `from`: [ranks], token rows of each; own: also those of this rank's tokens.
__device__ inline TokenRows token_rows(const RankContext& context, const std::int32_t* from,
                                       bool own, int lane) {
  std::uint32_t before = 0;
  std::uint32_t all = 0;
  for (int peer = lane; peer < context.ranks; peer += kWarpLanes) {
    const auto rows = static_cast<std::uint32_t>(from[peer]);
    if (peer <= context.rank) before += rows;
    all += rows;
  }
  all = __reduce_add_sync(kAllLanes, all);
  const auto mine = static_cast<std::uint32_t>(from[context.rank]);
  return {__reduce_add_sync(kAllLanes, before), all, own ? all : all - mine};
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
