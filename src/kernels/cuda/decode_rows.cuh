// A row of few tokens on its way in plan_dispatch.cu, a piece a warp: loaded and converted into shared
// memory, all of its places but the base found, and sent when the base is there.
#pragma once

#include <cstdint>

#include "kernels/cuda/counting.cuh"
#include "kernels/cuda/marks.cuh"
#include "kernels/cuda/pipeline.cuh"
#include "kernels/cuda/placing.cuh"
#include "kernels/cuda/row_pieces.cuh"

namespace wherry::kernels::cuda {

// One warp: its piece as it travels.
template <bool kQuantised, bool kBulk>
__device__ void stage(const Outgoing& send, const Item& item, const Pieces& pieces,
                      const Buffers& buffers, std::uint32_t parity) {
  const std::byte* from = send.x + item.token * send.x_pitch +
                          item.first_step * (kQuantised ? kStepSourceBytes : kStepBytes);
  if (pieces.loads_bulk) wait_for_piece(buffers, parity);
  if constexpr (kQuantised) {
    if (pieces.loads_bulk) {  // a call of its own: it loads from shared memory by name
      quantise_piece(item, buffers.source, buffers);
    } else {
      quantise_piece(item, from, buffers);
    }
  } else if (!pieces.loads_bulk) {
    for (auto at = static_cast<std::uint32_t>(lane_index()) * 16; at < item.bytes;
         at += kStepBytes) {
      *reinterpret_cast<uint4*>(buffers.row + at) = *reinterpret_cast<const uint4*>(from + at);
    }
  }
#ifdef WHERRY_HAS_BULK_COPY
  if constexpr (kBulk) fence_shared_to_bulk();
#endif
  __syncwarp();
}

// --- Places -------------------------------------------------------------------------------------

// What a block knows of its rank's choices.
struct Known {
  const CountShared& shared;
  Marks marks;
  const std::int32_t* slots;  // of the choices of the block's tokens
  std::byte* const* windows;
  std::uint32_t first_token;  // of the block
};

// One warp, one token: its choices, a lane each. Until add_base rows are counted from those of this
// rank's first token.
struct Place {
  Choice choice;
  std::int32_t slot;
  bool first_of_rank;
  std::byte* window;
};
__device__ inline Place place_token(const CountArgs& args, const Known& known, std::uint32_t token,
                                    int lane) {
  Place place{{}, -1, false, nullptr};
  const auto topk = static_cast<std::uint32_t>(args.context.topk);
  if (lane < args.context.topk) {
    place.slot = known.slots[(token - known.first_token) * topk + static_cast<std::uint32_t>(lane)];
    if (place.slot >= 0) {
      place.choice.dest = known.shared.slot_rank[place.slot];
      place.choice.row = marked_before(known.marks, place.slot, token);
      place.choice.token_row =
          marked_before(known.marks, args.placement.slots + place.choice.dest, token);
      place.window = known.windows[place.choice.dest];
    }
  }
  const bool first = is_first_with(place.slot, lane);  // of all lanes
  place.choice.repeat = place.slot >= 0 && !first;
  place.first_of_rank = is_first_with(place.choice.dest, lane);
  return place;
}
__device__ inline void add_base(const CountArgs& args, const CountShared& shared, Place& place) {
  if (place.slot < 0) return;
  Choice& choice = place.choice;
  choice.row += shared.base[place.slot];
  if (args.drops && choice.row >= shared.end[place.slot]) choice.row = -1;
  choice.token_row += shared.base[args.placement.slots + choice.dest];
}

__device__ inline float weight_of(const CountArgs& args, std::uint32_t token, int lane) {
  if (args.weights == nullptr || lane >= args.context.topk) return 1.0F;
  return args.weights[token * static_cast<std::uint32_t>(args.context.topk) +
                      static_cast<std::uint32_t>(lane)];
}

// --- Rows to their places -----------------------------------------------------------------------

// Where this lane's copies of a piece begin in the first row of its window: asked for before the rows
// are known.
struct Base {
  std::byte* row;
  std::byte* scales;
};
__device__ inline Base base_of(const RankContext& context, const Outgoing& send, const Item& item,
                               const Place& place) {
  return {place.window + context.layout.row(send.generation, 0) + item.first_step * kStepBytes,
          place.window + context.layout.scale_plane(send.generation) +
              item.first_step * kStepScaleBytes};
}
// This lane's row and scales of a piece, if it has a place.
struct Target {
  bool sends;
  std::byte* row;
  std::byte* scales;
};
__device__ inline Target target_of(const RankContext& context, const Outgoing& send,
                                   std::uint32_t row_bytes, const Base& base, const Place& place,
                                   unsigned fills, int lane) {
  const Choice& choice = place.choice;
  const bool sends = sends_row(context, send.rows, choice, place.first_of_rank, fills, lane);
  const auto row =
      static_cast<std::uint32_t>(send.rows == Rows::per_rank ? choice.token_row : choice.row);
  return {sends, base.row + std::uint64_t{row} * row_bytes, base.scales + row * send.scale_pitch};
}

// One warp, a piece, by bulk copies, each of the lane that has the place. (They leave one after the
// other.)
template <bool kQuantised>
__device__ void send_bulk(const Outgoing& send, const Item& item, const Pieces& pieces,
                          const Buffers& buffers, const Target& to) {
#ifdef WHERRY_HAS_BULK_COPY
  if (!to.sends) return;
  bulk_store(to.row, shared_address(buffers.row), item.bytes, send.rows_stay);
  if constexpr (kQuantised) {
    bulk_store(to.scales, shared_address(buffers.scales), scale_bytes_of(send, item, pieces),
               send.rows_stay);
  }
  bulk_commit();
#endif
}

// One warp, a piece, by ordinary stores.
template <bool kQuantised>
__device__ void send_piece(const Outgoing& send, const Item& item, const Pieces& pieces,
                           const Buffers& buffers, const Target& to, int lane) {
  const unsigned lanes = __ballot_sync(kAllLanes, to.sends);
  const auto mine = static_cast<std::uint32_t>(lane) * std::uint32_t{sizeof(uint4)};
  // What leaves for all places is read once; a piece is seldom longer than a step.
#pragma unroll 1
  for (std::uint32_t at = mine; at - mine < item.bytes; at += kStepBytes) {
    const bool has_unit = at < item.bytes;
    bool has_scales = false;
    uint4 unit{};
    uint4 scales{};
    if (has_unit) unit = *reinterpret_cast<const uint4*>(buffers.row + at);
    if constexpr (kQuantised) {
      has_scales = at < scale_bytes_of(send, item, pieces);
      if (has_scales) scales = *reinterpret_cast<const uint4*>(buffers.scales + at);
    }
    for_each_lane(lanes, [&](int source) {
      auto* row = reinterpret_cast<std::byte*>(
          __shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(to.row), source));
      if (has_unit) *reinterpret_cast<uint4*>(row + at) = unit;
      if constexpr (kQuantised) {
        auto* place = reinterpret_cast<std::byte*>(
            __shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(to.scales), source));
        if (has_scales) *reinterpret_cast<uint4*>(place + at) = scales;
      }
    });
  }
}

}  // namespace wherry::kernels::cuda
