// The rows of a plan's arrivals, whose number the device alone knows.
#pragma once

#include <cstdint>

#include "kernels/cuda/args.hpp"

namespace wherry::kernels::cuda {

struct FilledRows {
  Rows rows;  // per_rank: all token rows, else the rows of each slot
  std::int32_t local_slots;
  bool padding;  // grouped: the rows between the segments too
};

// body(row) for every `stride`-th of each run of filled rows, from the `first`.
template <typename Body>
__device__ void for_filled_rows(const PlanArrays& plan, const FilledRows& filled,
                                std::uint32_t first, std::uint32_t stride, Body body) {
  const auto run = [&](std::int32_t begin, std::int32_t end) {
    for (auto row = static_cast<std::uint32_t>(begin) + first;
         row < static_cast<std::uint32_t>(end); row += stride) {
      body(row);
    }
  };
  if (filled.rows == Rows::per_rank) {
    run(0, plan.totals[kTokenRowsReceived]);
  } else if (filled.padding) {
    run(0, plan.slot_begin[filled.local_slots]);
  } else {
    for (int slot = 0; slot < filled.local_slots; ++slot) {
      run(plan.slot_begin[slot], plan.slot_begin[slot] + plan.slot_counts[slot]);
    }
  }
}

}  // namespace wherry::kernels::cuda
