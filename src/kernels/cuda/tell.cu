// What the host has a rank's device tell its peers: that it is done with a generation (design 5.6) or
// with a window that another exchange takes its turn at, or the fault that ends the exchange (5.11).
#include "kernels/cuda/launch.hpp"
#include "kernels/cuda/signals.cuh"

namespace wherry::kernels::cuda {

namespace {

constexpr int kThreads = 32;

__device__ void tell_fault(const RankContext& context, const layout::Fault& fault) {
  if (threadIdx.x != 0) return;
  const std::uint64_t mine = layout::pack_fault(fault);
  const std::uint64_t before = replace_zero_system(own_fault_word(context), mine);
  store_for_host(context.fault_record, before == 0 ? mine : before);
  if (before != 0) return;
  for (int peer = 0; peer < context.ranks; ++peer) {
    if (peer == context.rank) continue;
    replace_zero_system(&window_at<layout::WindowHeader>(context, peer, 0)->fault, mine);
  }
}

__global__ void __launch_bounds__(kThreads)
    tell(const __grid_constant__ RankTable<TellArgs> table) {
  const TellArgs& args = table.rank[blockIdx.y];
  const auto channel = static_cast<std::uint32_t>(args.channel);
  const RankContext& context = args.context;
  if (args.fault.cause != 0) {
    tell_fault(context, args.fault);
    return;
  }
  std::uint32_t& sent = context.state->sent[channel][args.generation];
  std::uint32_t& received = context.state->received[channel][args.generation];
  if (args.send) {
    const StageBegin begin = begin_stage(context, sent);
    if (begin.failed) return;
    signal_peers(context, args.channel, args.generation, begin.epoch, [](int) { return 0U; });
    __syncthreads();
    if (threadIdx.x == 0) sent = begin.epoch;
  }
  if (args.receive) {
    __syncthreads();
    const StageBegin begin = begin_stage(context, received);
    if (begin.failed) return;
    const StageInfo info{Stage::dispatch_send, args.channel, args.generation, begin.epoch};
    if (!wait_for_peers(context, info, [](int) { return std::int64_t{-1}; })) return;
    if (threadIdx.x == 0) received = begin.epoch;
  }
}

}  // namespace

cudaError_t launch_tell(const RankTable<TellArgs>& table, int ranks, cudaStream_t stream) {
  tell<<<dim3(1, static_cast<unsigned>(ranks)), kThreads, 0, stream>>>(table);
  return cudaGetLastError();
}

}  // namespace wherry::kernels::cuda
