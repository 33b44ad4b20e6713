// Rows of a plan's arrivals between the caller's memory and a window in which they have another format:
// received rows back to their dtype, results to the format in which they go home. As copy_rows.cu, for rows
// that change.
#include "kernels/cuda/choices.cuh"
#include "kernels/cuda/filled_rows.cuh"
#include "kernels/cuda/formats.cuh"
#include "kernels/cuda/launch.hpp"

namespace wherry::kernels::cuda {

namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / kWarpLanes;

template <typename C>
__device__ void decode_row(const WireFormat& format, const std::byte* from,
                           const ScalesOfRow& scales, std::byte* to) {
  const auto hidden = static_cast<std::uint32_t>(format.hidden);
  const std::uint32_t row_bytes = hidden * bytes_of(format.dtype);
  for (auto element = static_cast<std::uint32_t>(lane_index() * C::kElements); element < hidden;
       element += C::kPieceElements) {
    typename C::Values values;
    decode<C>(format, from, scales, element, values);
    store_values<C>(format.dtype, to, element, row_bytes, values);
  }
}

// A warp a row.
template <typename C>
__global__ void __launch_bounds__(kThreads)
    convert_rows(const __grid_constant__ ConvertRowsArgs args) {
  const WireFormat& format = args.format;
  const auto hidden = static_cast<std::uint32_t>(format.hidden);
  for_filled_rows(
      args.plan, {args.rows, args.local_slots, args.padding},
      blockIdx.x * kWarps + static_cast<std::uint32_t>(warp_index()), gridDim.x * kWarps,
      [&](std::uint32_t row) {
        const std::byte* from = args.from + row * args.from_pitch;
        std::byte* to = args.to + row * args.to_pitch;
        const ScalesOfRow scales = scales_of_row(format, args.scales, args.scale_rows, row);
        if (args.back) {
          decode_row<C>(format, from, scales, to);
        } else {
          const RowSource<C> source{from, format.dtype, hidden * bytes_of(format.dtype)};
          encode_row<C>(format, source, to, scales);
        }
      });
}

}  // namespace

cudaError_t launch_convert_rows(const ConvertRowsArgs& args, int blocks, cudaStream_t stream) {
  const auto grid = static_cast<unsigned>(blocks);
  return with_codec(args.format, [&]<typename C>() {
    convert_rows<C><<<grid, kThreads, 0, stream>>>(args);
    return cudaGetLastError();
  });
}

}  // namespace wherry::kernels::cuda
