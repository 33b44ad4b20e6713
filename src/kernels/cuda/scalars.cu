// One fp32 a row (a weight, a gradient) beside dispatch and combine: out before the rows are signalled,
// home after the results are there. Nothing here waits or signals; the stages do, in stream order.
#include "kernels/cuda/choices.cuh"
#include "kernels/cuda/launch.hpp"
#include "kernels/cuda/signals.cuh"

namespace wherry::kernels::cuda {

namespace {

constexpr int kThreads = 256;

// A thread a choice. The scalar of a row that serves several choices of a token is their sum, in k order.
__global__ void __launch_bounds__(kThreads) send_scalars(const __grid_constant__ ScalarsArgs args) {
  const PlanArrays& plan = args.plan;
  const auto topk = static_cast<std::uint32_t>(args.context.topk);
  const std::uint32_t choices = static_cast<std::uint32_t>(plan.tokens) * topk;
  for (std::uint32_t at = blockIdx.x * kThreads + threadIdx.x; at < choices;
       at += gridDim.x * kThreads) {
    const std::int32_t row = plan.row[at];
    if (row < 0 || plan.repeat[at] != 0) continue;
    const std::int32_t peer = plan.dest[at];
    float sum = 0.0F;
    for (std::uint32_t other = at; other < (at / topk + 1) * topk; ++other) {
      if (plan.dest[other] == peer && plan.row[other] == row) {
        sum = __fadd_rn(sum, args.from[other]);
      }
    }
    *window_at<float>(
        args.context, peer,
        args.context.layout.scalar(args.generation, static_cast<std::uint64_t>(row))) = sum;
  }
}

// The results' scalars into this rank's window, where home fetches them.
__global__ void __launch_bounds__(kThreads)
    place_scalars(const __grid_constant__ ScalarsArgs args) {
  const auto rows = static_cast<std::uint32_t>(args.plan.slot_begin[args.local_slots]);
  auto* to =
      own_window_at<float>(args.context, args.context.layout.result_scalar(args.generation, 0));
  for (std::uint32_t row = blockIdx.x * kThreads + threadIdx.x; row < rows;
       row += gridDim.x * kThreads) {
    to[row] = args.from[row];
  }
}

__global__ void __launch_bounds__(kThreads)
    fetch_scalars(const __grid_constant__ ScalarsArgs args) {
  const PlanArrays& plan = args.plan;
  const std::uint32_t choices =
      static_cast<std::uint32_t>(plan.tokens) * static_cast<std::uint32_t>(args.context.topk);
  for (std::uint32_t at = blockIdx.x * kThreads + threadIdx.x; at < choices;
       at += gridDim.x * kThreads) {
    const std::int32_t row = plan.row[at];
    float scalar = 0.0F;
    if (row >= 0) {
      scalar = *window_at<float>(
          args.context, plan.dest[at],
          args.context.layout.result_scalar(args.generation, static_cast<std::uint64_t>(row)));
    }
    args.to[at] = scalar;
  }
}

}  // namespace

cudaError_t launch_send_scalars(const ScalarsArgs& args, int blocks, cudaStream_t stream) {
  send_scalars<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}
cudaError_t launch_place_scalars(const ScalarsArgs& args, int blocks, cudaStream_t stream) {
  place_scalars<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}
cudaError_t launch_fetch_scalars(const ScalarsArgs& args, int blocks, cudaStream_t stream) {
  fetch_scalars<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace wherry::kernels::cuda
