// How every kernel of dispatch_send begins and ends.
#pragma once

#include <cstdint>

#include "kernels/cuda/choices.cuh"
#include "kernels/cuda/fill_rows.cuh"
#include "kernels/cuda/list_choices.cuh"
#include "kernels/cuda/overlap.cuh"
#include "kernels/cuda/signals.cuh"

namespace wherry::kernels::cuda {

__device__ inline StageInfo dispatch_info(const DispatchSendArgs& args, std::uint32_t epoch) {
  return {Stage::dispatch_recv, layout::Channel::dispatch, args.send.generation, epoch};
}

struct DispatchBegin {
  bool failed;
  std::uint32_t epoch;
  unsigned fills;  // ranks_that_fill()
};
__device__ inline DispatchBegin begin_dispatch_send(const DispatchSendArgs& args) {
  constexpr auto kChannel = static_cast<std::uint32_t>(layout::Channel::dispatch);
  const RankContext& context = args.context;
  const PlanArrays& plan = args.plan;
  touch_arguments(args, context);
  wait_for_earlier_kernels();
  const StageLook look =
      look_at_stage(context, context.state->sent[kChannel][args.send.generation]);
  const unsigned fills = ranks_that_fill(context, args.send.rows, plan.token_rows_to,
                                         plan.token_rows_from, lane_index());
  const StageBegin begin = begin_stage(context, look);
  if (args.send.overlaps) let_next_kernel_begin();
  return {begin.failed, begin.epoch, fills};
}

// Shared memory that the copies need no more. Empty in kernels that are never asked for lists.
struct Scratch {
  std::int32_t* words = nullptr;
  std::int32_t count = 0;
};

// Else the last block does what there is to do when the rows of all peers have come.
__device__ inline bool every_block_receives(const DispatchSendArgs& args,
                                            const DispatchBegin& begin) {
  return args.lists.choices != nullptr || begin.fills != 0;
}
__device__ inline void receive_rows(const DispatchSendArgs& args, const DispatchBegin& begin,
                                    const Scratch& scratch) {
  constexpr auto kChannel = static_cast<std::uint32_t>(layout::Channel::dispatch);
  const RankContext& context = args.context;
  const bool received = wait_for_peers(context, dispatch_info(args, begin.epoch), [&](int peer) {
    return std::int64_t{args.plan.token_rows_from[peer]};
  });
  if (!received) return;
  if (args.lists.choices != nullptr) {
    list_choices(context, args.plan, args.send.generation, args.lists, scratch.words,
                 scratch.count);
  }
  if (begin.fills != 0) {
    fill_further_slots(context, args.send.generation, args.plan.token_rows_from,
                       args.send.scale_pitch, gridDim.x);
  }
  if (threadIdx.x != 0) return;
  if (every_block_receives(args, begin) &&
      !is_last_to_leave(*context.state, Arrival::dispatch_received, gridDim.x)) {
    return;
  }
  context.state->received[kChannel][args.send.generation] = begin.epoch;
}

// All threads of all blocks, after each thread's own stores have been written.
__device__ inline void finish_dispatch_send(const DispatchSendArgs& args,
                                            const DispatchBegin& begin,
                                            const Scratch& scratch = {}) {
  constexpr auto kChannel = static_cast<std::uint32_t>(layout::Channel::dispatch);
  const RankContext& context = args.context;
  const bool last = is_last_block(*context.state, Arrival::dispatch_sent, gridDim.x);
  if (last) {
    if (warp_index() == 0) {
      signal_peers(
          context, layout::Channel::dispatch, args.send.generation, begin.epoch,
          [&](int peer) { return static_cast<std::uint32_t>(args.plan.token_rows_to[peer]); });
    }
    if (threadIdx.x == 0) context.state->sent[kChannel][args.send.generation] = begin.epoch;
  }
  if (args.send.receive && (last || every_block_receives(args, begin))) {
    receive_rows(args, begin, scratch);
  }
}

}  // namespace wherry::kernels::cuda
