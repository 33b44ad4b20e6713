// Stage 5, combine_send where what a rank has of a token goes home in another format than it has, and for
// rows of f64. What is converted is the sum as it is, not rounded to its dtype first. Without partials it
// only tells home, as combine_send.cu (convert_rows.cu has placed the results).
#include "kernels/cuda/combine_partials.cuh"
#include "kernels/cuda/combine_stage.cuh"
#include "kernels/cuda/home_terms.cuh"
#include "kernels/cuda/items.cuh"
#include "kernels/cuda/launch.hpp"
#include "kernels/cuda/signals.cuh"

namespace wherry::kernels::cuda {

namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / kWarpLanes;

// What this rank has of a token, summed: the source that is encoded. Summed again for each look at it.
template <typename C>
struct PartialSource {
  using Loaded = typename C::Values;
  static constexpr int kAhead = 1;
  const HomeTerm* terms;
  int count;
  DType dtype;
  std::uint32_t row_bytes;
  __device__ Loaded load(std::uint32_t element) const {
    Loaded sum{};
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      typename C::Values values;
      widen_packed<C>(dtype, load_packed<C>(dtype, terms[i].row, element, row_bytes), values);
      add_weighted<C>(sum, terms[i].weight, values);
    }
    return sum;
  }
  __device__ void widen(const Loaded& loaded, typename C::Values& values) const { values = loaded; }
};

template <typename C>
__device__ void send_partials(const CombineSendArgs& args, const WireFormat& format) {
  __shared__ HomeTerms terms[kWarps];
  const RankContext& context = args.context;
  const layout::WindowLayout& layout = context.layout;
  const int lane = lane_index();
  const int warp = warp_index();
  // Those of its own tokens too: they are worth what they are when converted.
  const TokenRows rows = token_rows(context, args.plan.token_rows_from, true, lane);
  Items items(*context.state, Arrival::combine_sent, rows.count,
              blockIdx.x * kWarps + static_cast<std::uint32_t>(warp), gridDim.x * kWarps);
  for (std::uint32_t number = items.next(); number < rows.count; number = items.next()) {
    const std::uint32_t token_row = rows.row(number);
    const layout::TokenEntry entry = load_entry(context, args.generation, token_row, lane);
    const Home home = home_of(context, args.plan, token_row, lane);
    const bool present = entry.position >= 0;
    const unsigned lanes = __ballot_sync(kAllLanes, present);
    const std::byte* row =
        present ? own_window_at<std::byte>(
                      context,
                      layout.result(args.generation, static_cast<std::uint64_t>(entry.position)))
                : nullptr;
    put_term(terms[warp], present, __popc(lanes & lanes_before(lane)),
             HomeTerm{row, nullptr, entry.weight, false});
    const PartialSource<C> source{terms[warp], __popc(lanes), args.dtype,
                                  static_cast<std::uint32_t>(layout.result_bytes)};
    encode_row<C>(
        format, source,
        window_at<std::byte>(context, home.peer, layout.partial(args.generation, home.at)),
        scales_of_row(
            format,
            window_at<std::byte>(context, home.peer, layout.home_scale(args.generation, home.at)),
            1, 0));
  }
}

template <typename C>
__global__ void __launch_bounds__(kThreads)
    combine_send_converted(const __grid_constant__ RankTable<CombineSendArgs> table,
                           const __grid_constant__ WireFormat format) {
  constexpr auto kChannel = static_cast<std::uint32_t>(layout::Channel::combine);
  const CombineSendArgs& args = table.rank[blockIdx.y];
  const RankContext& context = args.context;
  std::uint32_t& sent = context.state->sent[kChannel][args.generation];
  const StageBegin begin = begin_stage(context, sent);
  if (begin.failed) return;
  if (args.partials) send_partials<C>(args, format);
  if (!is_last_block(*context.state, Arrival::combine_sent, gridDim.x)) return;
  if (warp_index() == 0) {
    signal_results(context, args.plan, args.generation, begin.epoch);
  }
  if (threadIdx.x == 0) sent = begin.epoch;
}

}  // namespace

cudaError_t launch_combine_send_converted(const RankTable<CombineSendArgs>& table, int ranks,
                                          int blocks, const WireFormat& format,
                                          cudaStream_t stream) {
  return with_codec(format, [&]<typename C>() {
    const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(ranks));
    combine_send_converted<C><<<grid, kThreads, 0, stream>>>(table, format);
    return cudaGetLastError();
  });
}

}  // namespace wherry::kernels::cuda
