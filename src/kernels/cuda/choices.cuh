// A warp works on one token at a time; lane k < topk holds its choice k. All functions are called
// by whole warps.
#pragma once

#include <cstdint>

#include "kernels/cuda/args.hpp"
#include "kernels/cuda/signals.cuh"

namespace wherry::kernels::cuda {

inline constexpr unsigned kAllLanes = 0xFFFFFFFFU;
inline constexpr int kWarpLanes = 32;

__device__ inline int lane_index() { return static_cast<int>(threadIdx.x) % kWarpLanes; }
__device__ inline int warp_index() { return static_cast<int>(threadIdx.x) / kWarpLanes; }
__device__ inline unsigned lanes_before(int lane) { return (1U << lane) - 1U; }

// One warp: the sum of the values of this lane and those before it.
__device__ inline std::int32_t sum_up_to_lane(std::int32_t value, int lane) {
#pragma unroll
  for (int distance = 1; distance < kWarpLanes; distance *= 2) {
    const std::int32_t other = __shfl_up_sync(kAllLanes, value, distance);
    if (lane >= distance) value += other;
  }
  return value;
}

// What a launch finds in cold caches costs a trip each, one after the other, if it is asked for where
// it is needed: 2 us of a step of one token, 5 of one of 128. So the arguments and the addresses of the
// windows are asked for at once.
template <typename Args>
__device__ void touch_arguments(const Args& args, const RankContext& context) {
  constexpr int kLine = 64;
  constexpr int kLines = (static_cast<int>(sizeof(Args)) + kLine - 1) / kLine;
  const auto* words = reinterpret_cast<const std::uint32_t*>(&args);
#pragma unroll 1
  for (int line = warp_index(); lane_index() == 0 && line < kLines;
       line += static_cast<int>(blockDim.x) / kWarpLanes) {
    asm volatile("" ::"r"(words[line * (kLine / 4)]));
  }
  if (threadIdx.x < static_cast<unsigned>(context.ranks)) {
    asm volatile("" ::"l"(context.windows[threadIdx.x]));
  }
}

struct Choice {
  std::int32_t dest = -1;  // -1: no expert, dropped, or a lane without a choice
  std::int32_t row = -1;
  std::int32_t token_row = -1;
  float weight = 0.0F;
  bool repeat = false;
};

__device__ inline Choice load_choice(const PlanArrays& plan, int topk, std::uint32_t token,
                                     int lane) {
  Choice choice;
  if (lane >= topk || token >= static_cast<std::uint32_t>(plan.tokens)) return choice;
  const std::size_t at = static_cast<std::size_t>(token) * static_cast<std::size_t>(topk) +
                         static_cast<std::size_t>(lane);
  choice.dest = plan.dest[at];
  choice.row = plan.row[at];
  choice.token_row = plan.token_row[at];
  choice.weight = plan.weight[at];
  choice.repeat = plan.repeat[at] != 0;
  return choice;
}

// Whether no lane before this one holds the same value. Lanes with a negative value: false.
__device__ inline bool is_first_with(std::int32_t value, int lane) {
  const unsigned same = __match_any_sync(kAllLanes, value);
  return value >= 0 && (same & lanes_before(lane)) == 0;
}

// Calls body(lane) for each lane of the mask, ascending.
template <typename Body>
__device__ void for_each_lane(unsigned mask, Body body) {
  for (; mask != 0; mask &= mask - 1) body(__ffs(static_cast<int>(mask)) - 1);
}

// One warp: units [begin, end) of a row at `from` to the rows at `to` of the lanes in `targets`.
template <typename Unit>
__device__ void copy_units(const Unit* from, unsigned targets, Unit* to, std::uint32_t begin,
                           std::uint32_t end, int lane) {
  constexpr int kUnitsInFlight = 4;
  for (std::uint32_t base = begin; base < end; base += kUnitsInFlight * kWarpLanes) {
    Unit units[kUnitsInFlight];
#pragma unroll
    for (int i = 0; i < kUnitsInFlight; ++i) {
      const std::uint32_t at = base + static_cast<std::uint32_t>(i * kWarpLanes + lane);
      if (at < end) units[i] = __ldcs(from + at);
    }
    for_each_lane(targets, [&](int source) {
      auto* target = reinterpret_cast<Unit*>(
          __shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(to), source));
#pragma unroll
      for (int i = 0; i < kUnitsInFlight; ++i) {
        const std::uint32_t at = base + static_cast<std::uint32_t>(i * kWarpLanes + lane);
        if (at < end) target[at] = units[i];
      }
    });
  }
}

// Rows::first_slot: one row of each token goes from a rank to another, which fills the token's other slots from
// it, where both have so many tokens for each other (both know the numbers). For fewer the filling takes longer, 2.5 us,
// than the rows on the link; and a rank with few tokens of its own may have few blocks to fill with.
inline constexpr std::int32_t kManyTokenRows = 40;
// One warp: a bit for each rank, modulo the lanes, with which this one does so; all bits for more ranks than lanes. `to`,
// `from`: [ranks], token rows to and from each.
__device__ inline unsigned ranks_that_fill(const RankContext& context, Rows rows,
                                           const std::int32_t* to, const std::int32_t* from,
                                           int lane) {
  if (rows != Rows::first_slot) return 0;
  if (context.ranks > kWarpLanes) return kAllLanes;
  const bool other = lane != context.rank && lane < context.ranks;
  return __ballot_sync(kAllLanes, other && min(to[lane], from[lane]) >= kManyTokenRows);
}

// Whether this lane's choice has a row of its own to be sent. All lanes; `fills` as above.
__device__ inline bool sends_row(const RankContext& context, Rows rows, const Choice& choice,
                                 bool first_of_rank, unsigned fills, int lane) {
  if (rows == Rows::per_rank) return first_of_rank;
  const bool has_row = choice.row >= 0 && !choice.repeat;
  if (fills == 0) return has_row;
  const bool first_placed = is_first_with(choice.row >= 0 ? choice.dest : -1, lane);
  const unsigned bit = static_cast<unsigned>(choice.dest) % kWarpLanes;
  const bool once = choice.dest != context.rank && (fills >> bit & 1U) != 0;
  return once ? first_placed : has_row;
}

// The rows a token is written to: `lanes` is the same in all lanes, `row` and `to` are this lane's.
struct Destinations {
  unsigned lanes;
  unsigned first_of_rank;
  std::int32_t row;
  std::byte* to;
};
__device__ inline Destinations destinations_of(const RankContext& context, const Outgoing& send,
                                               const Choice& choice, unsigned fills, int lane) {
  const bool first_of_rank = is_first_with(choice.dest, lane);
  const bool sends = sends_row(context, send.rows, choice, first_of_rank, fills, lane);
  const std::int32_t row = send.rows == Rows::per_rank ? choice.token_row : choice.row;
  std::byte* to = nullptr;
  if (sends) {
    to = window_at<std::byte>(context, choice.dest,
                              context.layout.row(send.generation, static_cast<std::uint64_t>(row)));
  }
  return {__ballot_sync(kAllLanes, sends), __ballot_sync(kAllLanes, first_of_rank), row, to};
}
// Where the scales of row `row` of `peer` lie: row-major in a plane of their own.
__device__ inline std::byte* scales_at(const RankContext& context, const Outgoing& send,
                                       std::int32_t peer, std::int32_t row) {
  return window_at<std::byte>(context, peer,
                              context.layout.scale_plane(send.generation) +
                                  static_cast<std::uint64_t>(row) * send.scale_pitch);
}

// Tells each rank that gets a row of this token which of its choices are there, and where.
__device__ inline void write_entries(const RankContext& context, const Outgoing& send,
                                     const Choice& choice, unsigned first_of_rank, int lane) {
  const bool counted = !send.unweighted || !choice.repeat;
  const float weight = send.unweighted ? 1.0F : choice.weight;
  for_each_lane(first_of_rank, [&](int source) {
    const std::int32_t peer = __shfl_sync(kAllLanes, choice.dest, source);
    const std::int32_t token_row = __shfl_sync(kAllLanes, choice.token_row, source);
    if (lane >= context.topk) return;
    auto* entries = window_at<layout::TokenEntry>(
        context, peer,
        context.layout.token_entries(send.generation, static_cast<std::uint64_t>(token_row)));
    entries[lane] = {choice.dest == peer && counted ? choice.row : -1, weight};
  });
}

}  // namespace wherry::kernels::cuda
