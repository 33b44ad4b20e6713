// How every kernel of dispatch_send begins and ends.
#pragma once

#include <cstdint>

#include "kernels/cuda/choices.cuh"
#include "kernels/cuda/signals.cuh"

namespace wherry::kernels::cuda {

__device__ inline StageInfo dispatch_info(const DispatchSendArgs& args, std::uint32_t epoch) {
  return {Stage::dispatch_recv, layout::Channel::dispatch, args.send.generation, epoch};
}

__device__ inline StageBegin begin_dispatch_send(const DispatchSendArgs& args) {
  constexpr auto kChannel = static_cast<std::uint32_t>(layout::Channel::dispatch);
  return begin_stage(args.context, args.context.state->sent[kChannel][args.send.generation]);
}

// All threads of all blocks, after each thread's own stores have been written.
__device__ inline void finish_dispatch_send(const DispatchSendArgs& args, std::uint32_t epoch) {
  constexpr auto kChannel = static_cast<std::uint32_t>(layout::Channel::dispatch);
  const RankContext& context = args.context;
  if (!is_last_block(*context.state, Arrival::dispatch_sent, gridDim.x)) return;
  if (warp_index() == 0)
    signal_peers(context, layout::Channel::dispatch, args.send.generation, epoch, [&](int peer) {
      return static_cast<std::uint32_t>(args.plan.token_rows_to[peer]);
    });
  if (threadIdx.x == 0) context.state->sent[kChannel][args.send.generation] = epoch;
  if (!args.send.receive) return;
  const bool received = wait_for_peers(context, dispatch_info(args, epoch), [&](int peer) {
    return std::int64_t{args.plan.token_rows_from[peer]};
  });
  if (received && threadIdx.x == 0) context.state->received[kChannel][args.send.generation] = epoch;
}

}  // namespace wherry::kernels::cuda
