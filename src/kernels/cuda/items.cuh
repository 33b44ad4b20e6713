// How the warps of a rank share out its items: tokens, or parts of them.
#pragma once

#include <cstdint>

#include "kernels/cuda/choices.cuh"
#include "kernels/cuda/signals.cuh"

namespace wherry::kernels::cuda {

// Items [0, count) of a launch. Each warp begins with some of its own, its place among `warps` and every warps-th
// from there, and then takes what is left as it gets to it: with equal shares the slowest multiprocessor would end
// last, and over a link some get a third of what others get (8 ranks x 8 SMs on one GPU: 1050 us, not 927).
// Which warp has an item changes no result.
class Items {
 public:
  // One warp. `stage`: the one whose last block makes the counter 0 again. With two of its own or more, no warp waits
  // for the counter: what next() returns was asked for a call before.
  __device__ Items(RankState& state, Arrival stage, std::uint32_t count, std::uint32_t place,
                   std::uint32_t warps, std::uint32_t own = 2)
      : taken_by_all_(&state.taken[static_cast<std::uint32_t>(stage)]),
        count_(count),
        warps_(warps),
        own_(place),
        end_of_own_(own * warps) {
    if (any_taken()) take();
  }
  // One warp, all lanes: an item that no other warp has, or one behind the last.
  __device__ std::uint32_t next() {
    std::uint32_t item = own_;
    if (item < end_of_own_) {
      own_ += warps_;
      return item;
    }
    item = end_of_own_ + __shfl_sync(kAllLanes, taken_, 0);
    if (item < count_) take();
    return item;
  }
  // Whether some are left to be taken: then no thread of a block may arrive at the end of the stage before all
  // its warps have.
  [[nodiscard]] __device__ bool any_taken() const { return end_of_own_ < count_; }

 private:
  __device__ void take() {
    if (lane_index() == 0) taken_ = count_gpu(taken_by_all_);
  }

  std::uint32_t* taken_by_all_;
  std::uint32_t count_, warps_;
  std::uint32_t own_;  // the next of this warp's own
  std::uint32_t end_of_own_;
  std::uint32_t taken_ = 0;  // lane 0: behind all own ones, the item that this warp takes next
};

}  // namespace wherry::kernels::cuda
