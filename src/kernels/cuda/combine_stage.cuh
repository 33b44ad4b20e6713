// How the kernels of combine_send and combine_recv tell the homes and end.
#pragma once

#include <cstdint>

#include "kernels/cuda/signals.cuh"

namespace wherry::kernels::cuda {

// One warp: the results of each peer's token rows can be read.
__device__ inline void signal_results(const RankContext& context, const PlanArrays& plan,
                                      std::uint32_t generation, std::uint32_t epoch) {
  signal_peers(context, layout::Channel::combine, generation, epoch,
               [&](int peer) { return static_cast<std::uint32_t>(plan.token_rows_from[peer]); });
}

// All threads of every block: until the results of every peer can be read. False if one did not come.
__device__ inline bool wait_for_results(const CombineRecvArgs& args, std::uint32_t epoch) {
  return wait_for_peers(args.context,
                        {Stage::combine_recv, layout::Channel::combine, args.generation, epoch},
                        [&](int peer) { return std::int64_t{args.plan.token_rows_to[peer]}; });
}

// Whether 16 bytes of out may be written at once.
__device__ inline bool out_aligned(const CombineRecvArgs& args) {
  return (args.context.layout.result_bytes | args.out_pitch |
          reinterpret_cast<std::uintptr_t>(args.out)) %
             sizeof(uint4) ==
         0;
}

// All threads of every block, when their sums are stored. took_items: some of its warps have taken some.
__device__ inline void finish_combine_recv(const CombineRecvArgs& args, std::uint32_t epoch,
                                           bool took_items) {
  constexpr auto kChannel = static_cast<std::uint32_t>(layout::Channel::combine);
  RankState& state = *args.context.state;
  if (took_items) __syncthreads();
  if (threadIdx.x != 0 || !is_last_to_leave(state, Arrival::combine_received, gridDim.x)) return;
  state.received[kChannel][args.generation] = epoch;
  if (args.send) state.sent[kChannel][args.generation] = epoch;
}

// All ranks of a launch that have tokens have an addend, or none: kernels with one are others.
enum class Addends { none, all, differ };
inline Addends addends_of(const RankTable<CombineRecvArgs>& table, int ranks) {
  int with = 0;
  int without = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    if (table.rank[rank].plan.tokens == 0) continue;
    ++(table.rank[rank].addend != nullptr ? with : without);
  }
  if (with > 0 && without > 0) return Addends::differ;
  return with > 0 ? Addends::all : Addends::none;
}

}  // namespace wherry::kernels::cuda
