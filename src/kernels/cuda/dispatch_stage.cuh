// How every kernel of dispatch_send begins and ends.
#pragma once

#include <cstdint>

#include "kernels/cuda/choices.cuh"
#include "kernels/cuda/list_choices.cuh"
#include "kernels/cuda/overlap.cuh"
#include "kernels/cuda/signals.cuh"

namespace wherry::kernels::cuda {

__device__ inline StageInfo dispatch_info(const DispatchSendArgs& args, std::uint32_t epoch) {
  return {Stage::dispatch_recv, layout::Channel::dispatch, args.send.generation, epoch};
}

__device__ inline StageBegin begin_dispatch_send(const DispatchSendArgs& args) {
  constexpr auto kChannel = static_cast<std::uint32_t>(layout::Channel::dispatch);
  touch_arguments(args, args.context);
  wait_for_earlier_kernels();
  const StageBegin begin =
      begin_stage(args.context, args.context.state->sent[kChannel][args.send.generation]);
  if (args.send.overlaps) let_next_kernel_begin();
  return begin;
}

// Shared memory that the copies need no more. Empty in kernels that are never asked for lists.
struct Scratch {
  std::int32_t* words = nullptr;
  std::int32_t count = 0;
};

// Every block: the lists, when the rows of all peers have come.
__device__ inline void receive_and_list(const DispatchSendArgs& args, std::uint32_t epoch,
                                        const Scratch& scratch) {
  constexpr auto kChannel = static_cast<std::uint32_t>(layout::Channel::dispatch);
  const RankContext& context = args.context;
  const bool received = wait_for_peers(context, dispatch_info(args, epoch), [&](int peer) {
    return std::int64_t{args.plan.token_rows_from[peer]};
  });
  if (!received) return;
  if (args.lists.choices != nullptr) {
    list_choices(context, args.plan, args.send.generation, args.lists, scratch.words,
                 scratch.count);
    if (threadIdx.x != 0 ||
        !is_last_to_leave(*context.state, Arrival::dispatch_received, gridDim.x)) {
      return;
    }
  }
  if (threadIdx.x == 0) context.state->received[kChannel][args.send.generation] = epoch;
}

// All threads of all blocks, after each thread's own stores have been written.
__device__ inline void finish_dispatch_send(const DispatchSendArgs& args, std::uint32_t epoch,
                                            const Scratch& scratch = {}) {
  constexpr auto kChannel = static_cast<std::uint32_t>(layout::Channel::dispatch);
  const RankContext& context = args.context;
  const bool last = is_last_block(*context.state, Arrival::dispatch_sent, gridDim.x);
  if (last) {
    if (warp_index() == 0) {
      signal_peers(context, layout::Channel::dispatch, args.send.generation, epoch, [&](int peer) {
        return static_cast<std::uint32_t>(args.plan.token_rows_to[peer]);
      });
    }
    if (threadIdx.x == 0) context.state->sent[kChannel][args.send.generation] = epoch;
  }
  if (args.send.receive && (last || args.lists.choices != nullptr)) {
    receive_and_list(args, epoch, scratch);
  }
}

}  // namespace wherry::kernels::cuda
