// Stage 5, combine_send: tells home that the results can be pulled.
#include "kernels/cuda/combine_stage.cuh"
#include "kernels/cuda/launch.hpp"
#include "kernels/cuda/overlap.cuh"
#include "kernels/cuda/signals.cuh"

namespace wherry::kernels::cuda {

namespace {

// One warp a rank.
__global__ void combine_send(const __grid_constant__ RankTable<CombineSendArgs> table) {
  constexpr auto kChannel = static_cast<std::uint32_t>(layout::Channel::combine);
  const CombineSendArgs& args = table.rank[blockIdx.y];
  const RankContext& context = args.context;
  wait_for_earlier_kernels();
  std::uint32_t& sent = context.state->sent[kChannel][args.generation];
  const StageBegin begin = begin_stage(context, sent);
  if (begin.failed) return;
  if (args.overlaps) let_next_kernel_begin();
  signal_results(context, args.plan, args.generation, begin.epoch);
  if (threadIdx.x == 0) sent = begin.epoch;
}

}  // namespace

cudaError_t launch_combine_send(const RankTable<CombineSendArgs>& table, int ranks,
                                cudaStream_t stream) {
  const dim3 grid(1, static_cast<unsigned>(ranks));
  return launch_kernel(table.rank[0].overlaps, combine_send, grid, 32, 0, stream, table);
}

}  // namespace wherry::kernels::cuda
