// Stage 5, combine_send: tells home that the results can be pulled. With by_rank, what this rank
// has of each token is first summed into one partial row: weights travelled with the rows.
#include "kernels/cuda/choices.cuh"
#include "kernels/cuda/combine_stage.cuh"
#include "kernels/cuda/launch.hpp"
#include "kernels/cuda/overlap.cuh"
#include "kernels/cuda/row_sum.cuh"
#include "kernels/cuda/signals.cuh"

namespace wherry::kernels::cuda {

namespace {

constexpr int kThreads = kMaxSumThreads;
constexpr int kWarps = kThreads / kWarpLanes;

// An item is (token row, part): with few of them several warps share one.
template <typename Element>
__device__ void sum_partials(const CombineSendArgs& args) {
  __shared__ WarpTerms terms[kWarps];
  const RankContext& context = args.context;
  const layout::WindowLayout& layout = context.layout;
  const int lane = lane_index();
  const int warp = warp_index();
  const auto token_rows = static_cast<std::uint32_t>(args.plan.totals[kTokenRowsReceived]);
  const auto vectors = static_cast<std::uint32_t>(layout.result_pitch / sizeof(uint4));
  const std::uint32_t warps = gridDim.x * kWarps;
  const std::uint32_t most = (vectors + kWarpLanes - 1) / kWarpLanes;
  const std::uint32_t wanted = token_rows == 0 ? 1 : (warps + token_rows - 1) / token_rows;
  const auto [parts, part_vectors] = layout::even_parts(vectors, min(wanted, most));
  for (std::uint32_t item = blockIdx.x * kWarps + static_cast<std::uint32_t>(warp);
       item < token_rows * parts; item += warps) {
    const std::uint32_t token_row = item / parts;
    const std::uint32_t first = item % parts * part_vectors;
    const auto* entries = window_at<layout::TokenEntry>(
        context, context.rank, layout.token_entries(args.generation, token_row));
    layout::TokenEntry entry{-1, 0.0F};
    if (lane < context.topk) entry = entries[lane];
    const bool present = entry.position >= 0;
    const unsigned lanes = __ballot_sync(kAllLanes, present);
    const std::byte* row =
        present ? window_at<std::byte>(
                      context, context.rank,
                      layout.result(args.generation, static_cast<std::uint64_t>(entry.position)))
                : nullptr;
    put_term(terms[warp], present, __popc(lanes & lanes_before(lane)), Term{row, entry.weight, 0});
    auto* out =
        window_at<std::byte>(context, context.rank, layout.partial(args.generation, token_row));
    const SumTarget target{out,
                           true,
                           static_cast<std::uint32_t>(layout.result_bytes),
                           first,
                           min(first + part_vectors, vectors),
                           nullptr};
    sum_rows<Element, Arithmetic::weighted, false, false>(terms[warp], __popc(lanes), target, lane);
  }
}

template <typename Element>
__global__ void __launch_bounds__(kThreads)
    combine_send(const __grid_constant__ RankTable<CombineSendArgs> table) {
  constexpr auto kChannel = static_cast<std::uint32_t>(layout::Channel::combine);
  const CombineSendArgs& args = table.rank[blockIdx.y];
  const RankContext& context = args.context;
  touch_arguments(args, context);
  wait_for_earlier_kernels();
  std::uint32_t& sent = context.state->sent[kChannel][args.generation];
  const StageBegin begin = begin_stage(context, sent);
  if (begin.failed) return;
  if (args.overlaps) let_next_kernel_begin();
  if (args.partials) sum_partials<Element>(args);
  if (!is_last_block(*context.state, Arrival::combine_sent, gridDim.x)) return;
  if (warp_index() == 0) signal_results(context, args.plan, args.generation, begin.epoch);
  if (threadIdx.x == 0) sent = begin.epoch;
}

template <typename Element>
cudaError_t launch(const RankTable<CombineSendArgs>& table, int ranks, int blocks,
                   cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(ranks));
  return launch_kernel(table.rank[0].overlaps, combine_send<Element>, grid, kThreads, 0, stream,
                       table);
}

}  // namespace

cudaError_t launch_combine_send(const RankTable<CombineSendArgs>& table, int ranks, int blocks,
                                cudaStream_t stream) {
  switch (table.rank[0].dtype) {
    case DType::bf16: return launch<Bf16Element>(table, ranks, blocks, stream);
    case DType::f16: return launch<F16Element>(table, ranks, blocks, stream);
    case DType::f32: return launch<F32Element>(table, ranks, blocks, stream);
    case DType::f64:
    case DType::raw: break;
  }
  return cudaErrorInvalidValue;
}

}  // namespace wherry::kernels::cuda
