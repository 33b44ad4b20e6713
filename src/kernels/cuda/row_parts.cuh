// How the warps of a rank share out rows that are summed or copied: with few rows several warps take one.
#pragma once

#include <cstdint>

#include "kernels/cuda/choices.cuh"
#include "kernels/cuda/launch.hpp"

namespace wherry::kernels::cuda {

static_assert(kRowStepUnits == kWarpLanes);

// A warp's place among all `warps` of its rank, of which each of `blocks` blocks has some: blocks take turns, so that
// the parts of few rows go to as many multiprocessors as there are (1 token home over a link: 6.8 -> 6.0 us).
__device__ inline std::uint32_t place_of_warp(std::uint32_t blocks) {
  return static_cast<std::uint32_t>(warp_index()) * blocks + blockIdx.x;
}

// An item is (row, part). Begin and end of its part, in units of 16 bytes.
struct RowParts {
  std::uint32_t items;
  std::uint32_t parts;  // of a row
  std::uint32_t units;
  std::uint32_t part_units;

  // A rank's `warps`.
  __device__ RowParts(std::uint32_t rows, std::uint64_t row_pitch, std::uint32_t warps)
      : units(static_cast<std::uint32_t>(row_pitch / sizeof(uint4))) {
    const layout::Parts even = parts_of_row(rows, units, warps);
    parts = even.count;
    part_units = even.each;
    items = rows * parts;
  }
  [[nodiscard]] __device__ std::uint32_t row(std::uint32_t item) const { return item / parts; }
  [[nodiscard]] __device__ std::uint32_t begin(std::uint32_t item) const {
    return item % parts * part_units;
  }
  [[nodiscard]] __device__ std::uint32_t end(std::uint32_t item) const {
    return min(begin(item) + part_units, units);
  }
};

}  // namespace wherry::kernels::cuda
