// The lists that Layout::tokens hands out with its rows, made when the rows of all peers have come.
#pragma once

#include <cstdint>

#include "kernels/cuda/signals.cuh"

namespace wherry::kernels::cuda {

inline constexpr std::int32_t kListedSlots = 4096;  // room that a block has for them, if it can

// Layout::tokens: what each choice of a row is to this rank, and which row each grouped position takes.
// The search for the slot is a chain of loads, so it runs in shared memory: `begins`, with room for
// `most` slots. All threads of every block of the rank.
__device__ inline void list_choices(const RankContext& context, const PlanArrays& plan,
                                    std::uint32_t generation, const Lists& lists,
                                    std::int32_t* begins, std::int32_t most) {
  const bool fits = lists.local_slots <= most;
  for (auto slot = static_cast<std::int32_t>(threadIdx.x); fits && slot < lists.local_slots;
       slot += static_cast<std::int32_t>(blockDim.x)) {
    begins[slot] = plan.slot_begin[slot];
  }
  __syncthreads();
  const std::int32_t* slot_begin = fits ? begins : plan.slot_begin;
  const auto topk = static_cast<std::uint32_t>(context.topk);
  const std::uint32_t choices = static_cast<std::uint32_t>(plan.totals[kTokenRowsReceived]) * topk;
  const auto* entries =
      own_window_at<layout::TokenEntry>(context, context.layout.token_entries(generation, 0));
#pragma unroll 4
  for (std::uint32_t at = blockIdx.x * blockDim.x + threadIdx.x; at < choices;
       at += gridDim.x * blockDim.x) {
    const layout::TokenEntry entry = entries[at];
    TokenChoice choice{-1, entry.weight, entry.position};
    if (entry.position >= 0) {
      // The last slot that begins at or before the position, empty slots left out.
      std::int32_t low = 0;
      std::int32_t high = lists.local_slots;
      while (high - low > 1) {
        const std::int32_t middle = (low + high) / 2;
        (slot_begin[middle] <= entry.position ? low : high) = middle;
      }
      choice.local_slot = low;
      lists.gather[entry.position] = static_cast<std::int32_t>(at / topk);
    }
    lists.choices[at] = choice;
  }
}

}  // namespace wherry::kernels::cuda
