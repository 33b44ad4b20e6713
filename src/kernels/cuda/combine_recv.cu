// Stage 5, combine_recv: waits until every peer's results can be read, pulls each token's rows by
// 16-byte streaming loads, 8 to 16 in flight a lane, and sums them at home.
#include "kernels/cuda/combine_stage.cuh"
#include "kernels/cuda/combine_terms.cuh"
#include "kernels/cuda/items.cuh"
#include "kernels/cuda/launch.hpp"
#include "kernels/cuda/overlap.cuh"
#include "kernels/cuda/row_parts.cuh"
#include "kernels/cuda/signals.cuh"

namespace wherry::kernels::cuda {

namespace {

constexpr int kExactThreads = 512;  // twice the registers of kMaxSumThreads

// Returns Items::any_taken().
template <typename Element, Sum kSum, int kThreads, bool kAddend>
__device__ bool sum_tokens(const CombineRecvArgs& args, WarpTerms& terms, const RowParts& parts,
                           Source next) {
  const RankContext& context = args.context;
  const int lane = lane_index();
  const auto row_bytes = static_cast<std::uint32_t>(context.layout.result_bytes);
  const bool aligned = out_aligned(args);
  Items items(*context.state, Arrival::combine_received, parts.items, place_of_warp(gridDim.x),
              gridDim.x * (kThreads / kWarpLanes));
  std::uint32_t item = items.next();
  while (item < parts.items) {
    const std::uint32_t coming = items.next();
    const LaneTerm mine = find_term<kSum>(args, next, lane);
    put_term(terms, mine.present, mine.order, mine.term);
    next = load_source<kSum>(args, parts.row(coming), lane);
    const std::uint32_t token = parts.row(item);
    const SumTarget target{args.out + token * args.out_pitch,
                           aligned,
                           row_bytes,
                           parts.begin(item),
                           parts.end(item),
                           kAddend ? args.addend + token * args.addend_pitch : nullptr};
    sum_rows<Element, arithmetic_of(kSum), kThreads <= kExactThreads, kAddend>(
        terms, __popc(mine.lanes), target, lane);
    item = coming;
  }
  return items.any_taken();
}

template <typename Element, Sum kSum, int kThreads, bool kAddend>
__global__ void __launch_bounds__(kThreads, 1)
    combine_recv(const __grid_constant__ RankTable<CombineRecvArgs> table) {
  constexpr auto kChannel = static_cast<std::uint32_t>(layout::Channel::combine);
  __shared__ WarpTerms terms[kThreads / kWarpLanes];
  const CombineRecvArgs& args = table.rank[blockIdx.y];
  const RankContext& context = args.context;
  touch_arguments(args, context);
  wait_for_earlier_kernels();
  const StageBegin begin = begin_stage(context, context.state->received[kChannel][args.generation]);
  if (begin.failed) return;
  if (args.overlaps) let_next_kernel_begin();
  if (args.send && blockIdx.x == 0 && warp_index() == 0) {
    signal_results(context, args.plan, args.generation, begin.epoch);
  }
  // Asked for before the wait: it comes from far.
  const RowParts parts(static_cast<std::uint32_t>(args.plan.tokens), context.layout.result_pitch,
                       gridDim.x * (kThreads / kWarpLanes));
  const Source source = load_source<kSum>(args, parts.row(place_of_warp(gridDim.x)), lane_index());
  const bool complete = wait_for_results(args, begin.epoch);
  if (!complete) return;
  const bool taken =
      sum_tokens<Element, kSum, kThreads, kAddend>(args, terms[warp_index()], parts, source);
  finish_combine_recv(args, begin.epoch, taken);
}

template <typename Element, Sum kSum, int kThreads, bool kAddend>
cudaError_t launch(const RankTable<CombineRecvArgs>& table, int ranks, const CombineShape& shape,
                   cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(shape.blocks), static_cast<unsigned>(ranks));
  return launch_kernel(table.rank[0].overlaps, combine_recv<Element, kSum, kThreads, kAddend>, grid,
                       kThreads, 0, stream, table);
}

template <typename Element, bool kAddend>
cudaError_t launch_rows_of(const RankTable<CombineRecvArgs>& table, int ranks,
                           const CombineShape& shape, cudaStream_t stream) {
  switch (table.rank[0].sum) {
    case Sum::token_rows:
      if constexpr (!kAddend) {
        if (shape.threads == kExactThreads) {
          return launch<Element, Sum::token_rows, kExactThreads, false>(table, ranks, shape,
                                                                        stream);
        }
      }
      return launch<Element, Sum::token_rows, kMaxSumThreads, kAddend>(table, ranks, shape, stream);
    case Sum::partials: break;  // launch_combine_partials
    case Sum::ranked:
      return launch<Element, Sum::ranked, kMaxSumThreads, kAddend>(table, ranks, shape, stream);
    case Sum::choices:
      return launch<Element, Sum::choices, kMaxSumThreads, kAddend>(table, ranks, shape, stream);
  }
  return cudaErrorInvalidValue;
}

template <typename Element>
cudaError_t launch_sums_of(const RankTable<CombineRecvArgs>& table, int ranks,
                           const CombineShape& shape, cudaStream_t stream) {
  switch (addends_of(table, ranks)) {
    case Addends::none: return launch_rows_of<Element, false>(table, ranks, shape, stream);
    case Addends::all: return launch_rows_of<Element, true>(table, ranks, shape, stream);
    case Addends::differ: break;
  }
  return cudaErrorInvalidValue;
}

}  // namespace

CombineShape choose_combine_shape(const CombineJob& job) {
  // Few rows a token: fewer threads with more loads each keep more bytes in flight (4 ranks x 16 SMs:
  // 315 -> 288 us). With more rows that is slower as one process a rank (8 x 16: 748 -> 1041 us).
  const bool plain = job.sum == Sum::token_rows;
  // Over a link: with few SMs half to nine tenths of the time of ordinary loads, with 64 3 % more.
  constexpr int kFewSms = 32;
  if (plain && job.bulk && job.num_sms <= kFewSms) return choose_combine_bulk_shape(job);
  const int threads = plain && job.copies < 4.5 ? kExactThreads : kMaxSumThreads;
  CombineShape shape;
  shape.blocks = job.num_sms;
  shape.threads = threads;
  return shape;
}

cudaError_t launch_combine_recv(const RankTable<CombineRecvArgs>& table, int ranks,
                                const CombineShape& shape, cudaStream_t stream) {
  if (shape.slots != 0) return launch_combine_recv_bulk(table, ranks, shape, stream);
  return with_element(table.rank[0].dtype, [&]<typename Element>() {
    return launch_sums_of<Element>(table, ranks, shape, stream);
  });
}

}  // namespace wherry::kernels::cuda
