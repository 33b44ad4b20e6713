// A piece of a row on its way, a warp at a time: loaded into shared memory, and quantised there from bf16 to
// e4m3_block128.
#pragma once

#include <cstdint>

#include "kernels/cuda/args.hpp"
#include "kernels/cuda/pipeline.cuh"
#include "kernels/cuda/quantise.cuh"

namespace wherry::kernels::cuda {

// Rows are made ready in steps of 512 bytes of the row that travels; a piece has some of them.
inline constexpr std::uint32_t kStepBytes = 512;
inline constexpr std::uint32_t kStepScaleBytes = kPieceElements / kBlockElements * sizeof(float);
inline constexpr std::uint32_t kStepSourceBytes = 2 * kStepBytes;  // bf16 that becomes a step

WHERRY_HD constexpr std::size_t piece_bytes(int steps, bool quantised, bool loads_bulk) {
  return static_cast<std::size_t>(steps) *
         (kStepBytes + (quantised ? kStepScaleBytes + (loads_bulk ? kStepSourceBytes : 0U) : 0U));
}

// What a kernel is told about its shape.
struct Pieces {
  std::uint32_t of_row;
  std::uint32_t steps;  // of a piece
  bool loads_bulk;
};

// A warp's part of shared memory.
struct Buffers {
  std::byte* row;
  std::byte* scales;
  std::byte*
      source;  // bulk loads go here: quantised rows are made from it, others travel from there
  std::uint64_t* loaded;
};

// Tokens [begin, end) of a block, or of a rank.
struct Chunk {
  std::uint32_t begin, end;
};

// What a warp does at a time: a piece of a token's row.
struct Item {
  std::uint32_t token;
  std::uint32_t piece;
  std::uint32_t first_step;
  std::uint32_t bytes;  // of the row
};
__device__ inline Item item_of(const Chunk& chunk, const Pieces& pieces, std::uint32_t row_bytes,
                               std::uint32_t at) {
  const std::uint32_t piece = at % pieces.of_row;
  const std::uint32_t first = piece * pieces.steps;
  return {chunk.begin + at / pieces.of_row, piece, first,
          min(pieces.steps * kStepBytes, row_bytes - first * kStepBytes)};
}

// Of the row's scales, those of a piece.
__device__ inline std::uint32_t scale_bytes_of(const Outgoing& send, const Item& item,
                                               const Pieces& pieces) {
  return min(pieces.steps * kStepScaleBytes,
             static_cast<std::uint32_t>(send.scale_pitch) - item.first_step * kStepScaleBytes);
}

// --- Rows to shared memory ----------------------------------------------------------------------

// The source of a piece, asked for by one lane.
template <bool kQuantised>
__device__ void load_piece(const Outgoing& send, const Item& item, const Buffers& buffers) {
#ifdef WHERRY_HAS_BULK_COPY
  constexpr std::uint32_t kFactor = kQuantised ? 2 : 1;
  if (lane_index() != 0) return;
  const std::uint32_t barrier = shared_address(buffers.loaded);
  barrier_expect_bytes(barrier, kFactor * item.bytes);
  bulk_load(shared_address(buffers.source),
            send.x + item.token * send.x_pitch + item.first_step * (kFactor * kStepBytes),
            kFactor * item.bytes, barrier);
#endif
}
__device__ inline void wait_for_piece(const Buffers& buffers, std::uint32_t parity) {
#ifdef WHERRY_HAS_BULK_COPY
  barrier_wait(shared_address(buffers.loaded), parity);
#endif
}

// `from`: the item's first element, in shared or global memory. Two steps at a time: what one waits for,
// the other fills.
__device__ inline void quantise_piece(const Item& item, const std::byte* from,
                                      const Buffers& buffers) {
  constexpr int kTogether = 2;
  const auto lane_element = static_cast<std::uint32_t>(lane_index() * kLaneElements);
#pragma unroll 1
  for (std::uint32_t first = lane_element; first - lane_element < item.bytes;
       first += kTogether * kPieceElements) {
    LaneBlock blocks[kTogether];
#pragma unroll
    for (std::uint32_t b = 0; b < kTogether; ++b) {
      const std::uint32_t element = first + b * kPieceElements;
      uint4(&packed)[2] = blocks[b].packed;
      packed[0] = packed[1] = uint4{};
      if (element >= item.bytes) continue;
      const auto* at = reinterpret_cast<const uint4*>(from + element * 2);
      packed[0] = at[0];
      packed[1] = at[1];
    }
    quantise(blocks);
#pragma unroll
    for (std::uint32_t b = 0; b < kTogether; ++b) {
      const std::uint32_t element = first + b * kPieceElements;
      const bool inside = element < item.bytes;
      if (inside) *reinterpret_cast<uint4*>(buffers.row + element) = blocks[b].codes;
      if (lane_index() % kLanesPerBlock == 0 && element - lane_element < item.bytes) {
        reinterpret_cast<float*>(buffers.scales)[element / kBlockElements] =
            inside ? blocks[b].scale : 0.0F;
      }
    }
  }
}

}  // namespace wherry::kernels::cuda
