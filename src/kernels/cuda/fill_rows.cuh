// Rows::first_slot: of a peer's token with several slots on this rank one row has crossed the link; the others are
// filled from it here.
#pragma once

#include <cstdint>

#include "kernels/cuda/items.cuh"
#include "kernels/cuda/row_parts.cuh"
#include "kernels/cuda/token_rows.cuh"

namespace wherry::kernels::cuda {

// All threads of each of the rank's `blocks` blocks, when the rows of all peers have come. `from`: [ranks], token rows of
// each. Rows that crossed for every slot are filled again where others of this rank's are: with the same bits.
// scale_pitch: bytes of a row's scales, or 0. Returns Items::any_taken(), behind a barrier if so. Not inlined: few
// launches fill, and others would have its code in their way.
__device__ __noinline__ inline bool fill_further_slots(const RankContext& context,
                                                       std::uint32_t generation,
                                                       const std::int32_t* from,
                                                       std::uint64_t scale_pitch,
                                                       std::uint32_t blocks) {
  const layout::WindowLayout& layout = context.layout;
  const int lane = lane_index();
  const TokenRows rows = token_rows(context, from, false, lane);
  const auto scale_units = static_cast<std::uint32_t>(scale_pitch / sizeof(uint4));
  const std::uint32_t warps = blocks * (blockDim.x / kWarpLanes);
  const RowParts parts(rows.count, layout.row_pitch, warps);
  Items items(*context.state, Arrival::dispatch_received, parts.items, place_of_warp(blocks),
              warps);
  for (std::uint32_t item = items.next(); item < parts.items; item = items.next()) {
    const std::int32_t position =
        load_entry(context, generation, rows.row(parts.row(item)), lane).position;
    const unsigned here = __ballot_sync(kAllLanes, position >= 0);
    const bool first_there = is_first_with(position, lane);
    const unsigned distinct = __ballot_sync(kAllLanes, first_there);
    const unsigned targets = distinct & (distinct - 1);
    if (targets == 0) continue;  // one slot, or all dropped
    const auto row = static_cast<std::uint64_t>(position >= 0 ? position : 0);
    const int filled = __ffs(static_cast<int>(here)) - 1;  // the one that the sender has written
    const auto pointer_of_filled = [&](uint4* mine) {
      return reinterpret_cast<const uint4*>(
          __shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(mine), filled));
    };
    auto* to = own_window_at<uint4>(context, layout.row(generation, row));
    copy_units(pointer_of_filled(to), targets, to, parts.begin(item), parts.end(item), lane);
    if (scale_units == 0) continue;
    // One unit of scales (e4m3_block128, row-major) for each step of the row.
    auto* scales =
        own_window_at<uint4>(context, layout.scale_plane(generation) + row * scale_pitch);
    copy_units(pointer_of_filled(scales), targets, scales, parts.begin(item) / kRowStepUnits,
               min((parts.end(item) + kRowStepUnits - 1) / kRowStepUnits, scale_units), lane);
  }
  if (items.any_taken()) __syncthreads();
  return items.any_taken();
}

}  // namespace wherry::kernels::cuda
