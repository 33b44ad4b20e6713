// How the CUDA stages are launched. Every function is stream-ordered, returns without waiting,
// allocates nothing and is legal in a captured graph (capture whole multiples of the depth).
// `ranks` entries of the table are used. They return the launch's error.
//
// Choosing a shape is a pure function, apart from launching with it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/args.hpp"

namespace wherry::kernels::cuda {

// Threads and shared memory of one block of dispatch_send. A row travels in pieces, a warp at a
// time; each warp owns `stages` pieces of shared memory.
struct DispatchShape {
  int blocks = 0;  // per rank
  int warps = 0;
  int stages = 0;            // 0: ordinary loads and stores instead of bulk copies
  int stores_in_flight = 0;  // groups that may still be reading shared memory when a load is issued
  std::uint32_t piece_bytes = 0;
  bool whole_rows = false;  // what a warp takes at a time, else a piece
};
struct DispatchJob {
  std::int64_t tokens = 0;
  std::uint64_t row_bytes = 0;
  double copies = 1.0;  // rows a token is expected to be written to
  int num_sms = 1;
  bool bulk = false;  // the device has bulk copies, and rows and their pitch are legal for them
  bool link = false;  // ranks are on several GPUs
};
// Pure.
[[nodiscard]] DispatchShape choose_dispatch_shape(const DispatchJob& job);
// Whether x can be sent by bulk copies at all.
[[nodiscard]] inline bool bulk_legal(std::uint64_t row_bytes, std::uint64_t pitch,
                                     const void* x) noexcept {
  return row_bytes % 16 == 0 && pitch % 16 == 0 && reinterpret_cast<std::uintptr_t>(x) % 16 == 0;
}

// Units of 16 bytes of a row that a warp takes at once: one a lane.
inline constexpr std::uint32_t kRowStepUnits = 32;
// Parts of a row of `units` (1 or more), for `rows` that `warps` share out: each is some steps, and with fewer rows
// than warps there are no more in all than warps, so that none has two parts while others wait. Their size is in
// units. Pure.
[[nodiscard]] WHERRY_HD constexpr layout::Parts parts_of_row(std::uint32_t rows,
                                                             std::uint32_t units,
                                                             std::uint32_t warps) {
  const std::uint32_t steps = (units + kRowStepUnits - 1) / kRowStepUnits;
  const std::uint32_t most = rows < warps && rows > 0 ? warps / rows : 1;
  const layout::Parts even = layout::even_parts(steps, most < steps ? most : steps);
  return {even.count, even.each * kRowStepUnits};
}

// Blocks of a rank, and how they load rows.
struct CombineShape {
  int blocks = 0;
  int threads = 1024;  // of a block; plain sums also fewer, with more loads in flight in each
  // Rows come by bulk loads, each warp's into so many pieces of shared memory; 0: by ordinary loads.
  int slots = 0;
  std::uint32_t piece_bytes = 0;
};
struct CombineJob {
  std::uint64_t row_bytes = 0;
  double copies = 1.0;  // rows a token is expected to be summed from
  int num_sms = 1;
  Sum sum = Sum::token_rows;
  bool bulk = false;             // rows come over a link, and the device has bulk copies
  std::uint64_t most_terms = 1;  // of a token of Sum::token_rows
};
// Pure.
[[nodiscard]] CombineShape choose_combine_shape(const CombineJob& job);

// Stage 2.
// Tokens each of at most `blocks` blocks counts (CountArgs::chunk_tokens): what one block counts in
// two steps is not worth two. Pure.
[[nodiscard]] int choose_chunk_tokens(int tokens, int blocks, int topk);
// Blocks that a rank's plan takes: no more than were given to choose_chunk_tokens.
[[nodiscard]] WHERRY_HD constexpr int num_counting_blocks(int tokens, int chunk_tokens) {
  return tokens > chunk_tokens ? (tokens + chunk_tokens - 1) / chunk_tokens : 1;
}
[[nodiscard]] std::size_t count_workspace_bytes(int blocks, int slots, int ranks);
// shared_bytes: of shared_bytes_of_block().
cudaError_t launch_count(const RankTable<CountArgs>& table, int ranks, int shared_bytes,
                         cudaStream_t stream);

// Stages 2 and 3 in one launch, for few tokens: every block counts all tokens of its rank, and its
// warps have pieces of its own tokens' rows ready in shared memory when the counts arrive.
struct PlanDispatchShape {
  int chunk_tokens =
      0;           // tokens a block sends (CountArgs::chunk_tokens); 0: two launches are needed
  int pieces = 1;  // of a row
  int piece_steps = 1;  // 512 bytes of the row that travels
  std::size_t shared_bytes = 0;
  bool quantised = false;   // e4m3_block128
  bool loads_bulk = false;  // pieces come by bulk copies
  bool bulk = false;        // rows leave by bulk copies
};
struct PlanDispatchJob {
  int tokens = 0;  // of a rank, at most
  int num_sms = 1;
  int topk = 1;
  int ranks = 1;
  int experts = 1;
  int slots = 1;
  std::uint64_t row_bytes = 0;
  std::uint64_t scale_pitch = 0;  // 0: rows travel as they are
  bool bulk = false;              // the device has bulk copies
  int shared_bytes = 224 * 1024;  // a block may have: shared_bytes_of_block()
};
// Pure.
[[nodiscard]] PlanDispatchShape choose_plan_dispatch_shape(const PlanDispatchJob& job);
cudaError_t launch_plan_dispatch(const RankTable<PlanDispatchArgs>& table, int ranks,
                                 const PlanDispatchShape& shape, cudaStream_t stream);

// Stage 3.
cudaError_t launch_dispatch_send(const RankTable<DispatchSendArgs>& table, int ranks,
                                 const DispatchShape& shape, cudaStream_t stream);
// bf16 rows are sent as Wire::e4m3_block128, their scales row-major in the plane of scales. hidden is
// a multiple of 16.
struct E4m3Shape {
  int blocks = 0;
  int pieces = 0;       // of a row; 0: ordinary loads and stores instead of bulk copies
  int piece_steps = 0;  // 512 elements
};
// Pure. Of the job: tokens, row_bytes (which is hidden here), num_sms, bulk and link.
[[nodiscard]] E4m3Shape choose_e4m3_shape(const DispatchJob& job);
cudaError_t launch_dispatch_send_e4m3(const RankTable<DispatchSendArgs>& table, int ranks,
                                      const E4m3Shape& shape, std::int64_t hidden,
                                      cudaStream_t stream);
// Rows of any dtype are sent in `format`, which is another than theirs; or have it already
// (Outgoing::converted).
struct ConversionShape {
  int blocks = 0;
  int parts = 1;  // warps that share a token
};
struct ConversionJob {
  std::int64_t tokens = 0;
  std::int64_t hidden = 0;
  int num_sms = 1;
  Wire wire = Wire::same;
};
// Pure. Of launch_combine_recv_converted too.
[[nodiscard]] ConversionShape choose_conversion_shape(const ConversionJob& job);
cudaError_t launch_dispatch_send_converted(const RankTable<DispatchSendArgs>& table, int ranks,
                                           const ConversionShape& shape, const WireFormat& format,
                                           cudaStream_t stream);
cudaError_t launch_dispatch_recv(const RankTable<DispatchRecvArgs>& table, int ranks, int blocks,
                                 cudaStream_t stream);

// Stage 5. Rows of bf16, f16 or f32.
cudaError_t launch_combine_send(const RankTable<CombineSendArgs>& table, int ranks,
                                cudaStream_t stream);
cudaError_t launch_combine_recv(const RankTable<CombineRecvArgs>& table, int ranks,
                                const CombineShape& shape, cudaStream_t stream);
// Where choose_combine_shape() and launch_combine_recv() go for shapes with slots.
[[nodiscard]] CombineShape choose_combine_bulk_shape(const CombineJob& job);
cudaError_t launch_combine_recv_bulk(const RankTable<CombineRecvArgs>& table, int ranks,
                                     const CombineShape& shape, cudaStream_t stream);

// Sum::partials, either half or both.
cudaError_t launch_combine_partials(const RankTable<CombineRecvArgs>& table, int ranks, int blocks,
                                    cudaStream_t stream);

// The same where results, or the sums of a rank, go home in `format`; and for rows of f64.
cudaError_t launch_combine_send_converted(const RankTable<CombineSendArgs>& table, int ranks,
                                          int blocks, const WireFormat& format,
                                          cudaStream_t stream);
cudaError_t launch_combine_recv_converted(const RankTable<CombineRecvArgs>& table, int ranks,
                                          const ConversionShape& shape, const WireFormat& format,
                                          cudaStream_t stream);

// Before stage 5 where results are not in the window yet, or after stage 3 where rows shall not stay
// there. `blocks` are of this rank alone: nothing in it waits.
cudaError_t launch_copy_rows(const CopyRowsArgs& args, int blocks, cudaStream_t stream);
cudaError_t launch_convert_rows(const ConvertRowsArgs& args, int blocks, cudaStream_t stream);

// Row scalars: before dispatch_send; before combine_send; after combine_recv. As launch_copy_rows.
cudaError_t launch_send_scalars(const ScalarsArgs& args, int blocks, cudaStream_t stream);
cudaError_t launch_place_scalars(const ScalarsArgs& args, int blocks, cudaStream_t stream);
cudaError_t launch_fetch_scalars(const ScalarsArgs& args, int blocks, cudaStream_t stream);

// Credits of a generation, or the fault that ends the exchange everywhere.
cudaError_t launch_tell(const RankTable<TellArgs>& table, int ranks, cudaStream_t stream);

// Dynamic shared memory that a block of the current device may have, beside a few KiB of static.
cudaError_t shared_bytes_of_block(int& bytes);
// Whether the device can run launches with DispatchShape::stages.
cudaError_t has_bulk_copies(int device, bool& has);
// Loads every kernel, so that no launch that waits for another is the first to load one, and
// raises the shared memory limits.
cudaError_t prepare_dispatch_send();
cudaError_t prepare_dispatch_send_e4m3();
cudaError_t prepare_combine_recv();
cudaError_t prepare_combine_partials();
cudaError_t prepare_count();
cudaError_t prepare_plan_dispatch();
// Whether a plan of so many experts, slots and ranks fits into `shared_bytes`. Pure.
[[nodiscard]] bool plan_fits(int experts, int slots, int ranks, int shared_bytes);

}  // namespace wherry::kernels::cuda
