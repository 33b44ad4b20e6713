// Rows of a plan's arrivals from one memory of a rank to another: results into its window where the
// experts left them elsewhere, received rows out of it where the caller wants them elsewhere.
#include "kernels/cuda/choices.cuh"
#include "kernels/cuda/filled_rows.cuh"
#include "kernels/cuda/launch.hpp"

namespace wherry::kernels::cuda {

namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / kWarpLanes;

// Whatever memory `Unit` divides: rows of the arrivals, a warp a row.
template <typename Unit>
__global__ void __launch_bounds__(kThreads) copy_rows(const __grid_constant__ CopyRowsArgs args) {
  const PlanArrays& plan = args.plan;
  const auto units = static_cast<std::uint32_t>(args.row_bytes / sizeof(Unit));
  const std::uint32_t warps = gridDim.x * kWarps;
  const std::uint32_t first = blockIdx.x * kWarps + static_cast<std::uint32_t>(warp_index());
  for_filled_rows(
      plan, {args.rows, args.local_slots, args.padding}, first, warps, [&](std::uint32_t row) {
        const auto* from = reinterpret_cast<const Unit*>(args.from + row * args.from_pitch);
        auto* to = reinterpret_cast<Unit*>(args.to + row * args.to_pitch);
        for (auto at = static_cast<std::uint32_t>(lane_index()); at < units; at += kWarpLanes) {
          to[at] = from[at];
        }
      });
}

}  // namespace

cudaError_t launch_copy_rows(const CopyRowsArgs& args, int blocks, cudaStream_t stream) {
  const auto grid = static_cast<unsigned>(blocks);
  const std::uint64_t odd = 16 | args.row_bytes | args.from_pitch | args.to_pitch |
                            reinterpret_cast<std::uintptr_t>(args.from) |
                            reinterpret_cast<std::uintptr_t>(args.to);
  if (odd % 16 == 0) {
    copy_rows<uint4><<<grid, kThreads, 0, stream>>>(args);
  } else if (odd % 4 == 0) {
    copy_rows<std::uint32_t><<<grid, kThreads, 0, stream>>>(args);
  } else if (odd % 2 == 0) {
    copy_rows<std::uint16_t><<<grid, kThreads, 0, stream>>>(args);
  } else {
    copy_rows<std::uint8_t><<<grid, kThreads, 0, stream>>>(args);
  }
  return cudaGetLastError();
}

}  // namespace wherry::kernels::cuda
