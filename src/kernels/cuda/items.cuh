// How the warps of a rank share out its items: tokens, or parts of them.
#pragma once

#include <cstdint>

#include "kernels/cuda/choices.cuh"
#include "kernels/cuda/signals.cuh"

namespace wherry::kernels::cuda {

// Items [0, count) of a launch. Each warp begins with one or more of its own place, `placed` for all warps
// together, and takes the others as it gets to them: with equal shares the slowest multiprocessor would end
// last, and some get a third less of memory or link than others (8 ranks x 8 SMs: 1050 us, not 913). Which
// warp has an item changes no result.
class Items {
 public:
  // One warp. `stage`: the one whose last block makes the counter 0 again.
  __device__ Items(RankState& state, Arrival stage, std::uint32_t count, std::uint32_t placed)
      : taken_by_all_(&state.taken[static_cast<std::uint32_t>(stage)]),
        count_(count),
        placed_(placed) {
    if (placed < count) take();
  }
  // One warp, all lanes: an item that nobody has, or one behind the last. What is returned was asked for in the
  // call before, so that nobody waits for it.
  __device__ std::uint32_t next() {
    const std::uint32_t item = placed_ + __shfl_sync(kAllLanes, taken_, 0);
    if (item < count_) take();
    return item;
  }
  // Whether some are left to be taken: then no thread of a block may arrive at the end of the stage before all
  // its warps have.
  [[nodiscard]] __device__ bool any_taken() const { return placed_ < count_; }

 private:
  __device__ void take() {
    if (lane_index() == 0) taken_ = count_gpu(taken_by_all_);
  }

  std::uint32_t* taken_by_all_;
  std::uint32_t count_, placed_;
  std::uint32_t taken_ = 0;  // lane 0
};

}  // namespace wherry::kernels::cuda
