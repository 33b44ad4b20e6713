// Stage 3, dispatch_send where rows travel in another format than they have: each row is read once,
// converted in registers and written to all its places, its scales to their planes. Any dtype, any format,
// any address of x. (bf16 rows as e4m3_block128 have a kernel of their own in dispatch_send_e4m3.cu.) Rows that
// the caller has converted already pass as they are.
//
// A warp takes (token, part) items. int8_token and nvfp4 have one scale for a whole row, so there the warp
// reads all of the row before its part; the second time it comes from the L2 cache.
#include "kernels/cuda/choices.cuh"
#include "kernels/cuda/dispatch_stage.cuh"
#include "kernels/cuda/formats.cuh"
#include "kernels/cuda/items.cuh"
#include "kernels/cuda/launch.hpp"
#include "kernels/cuda/signals.cuh"

namespace wherry::kernels::cuda {

namespace {

constexpr int kThreads = 512;  // a lane holds 16 elements and the 16 that come next
constexpr int kWarps = kThreads / kWarpLanes;

// Where this token's rows go: `lanes` of the warp know a place each.
struct Places {
  Destinations destinations;
  ScalesOfRow scales;  // of this lane's

  // body(row in a window, its scales) for each place, by all lanes.
  template <typename Body>
  __device__ void for_each(Body body) const {
    for_each_lane(destinations.lanes, [&](int source) {
      body(pointer_of(destinations.to, source), pointer_of(scales.blocks, source));
    });
  }
  // The scale of each row (nvfp4, int8_token), by the lane that knows it.
  __device__ void store_whole(float scale) const {
    if (((destinations.lanes >> lane_index()) & 1U) != 0) {
      *reinterpret_cast<float*>(scales.whole) = scale;
    }
  }

 private:
  static __device__ std::byte* pointer_of(std::byte* pointer, int source) {
    return reinterpret_cast<std::byte*>(
        __shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(pointer), source));
  }
};
__device__ Places places_of(const DispatchSendArgs& args, const WireFormat& format,
                            const Choice& choice, unsigned fills, int lane) {
  const RankContext& context = args.context;
  const auto rows = static_cast<std::int64_t>(context.layout.row_capacity);
  Places places{destinations_of(context, args.send, choice, fills, lane), {nullptr, nullptr, rows}};
  if (format.scale_type != ScaleType::none && ((places.destinations.lanes >> lane) & 1U) != 0) {
    auto* plane = window_at<std::byte>(context, choice.dest,
                                       context.layout.scale_plane(args.send.generation));
    places.scales = scales_of_row(format, plane, rows, places.destinations.row);
  }
  return places;
}

// Of `count`, what part `part` of `parts` is.
struct Part {
  std::uint32_t begin, end;
};
__device__ Part part_of(std::uint32_t count, std::uint32_t part, std::uint32_t parts) {
  const std::uint32_t each = (count + parts - 1) / parts;
  return {min(part * each, count), min((part + 1) * each, count)};
}

template <typename C>
__device__ void convert_part(const DispatchSendArgs& args, const WireFormat& format,
                             const Places& places, std::uint32_t token, std::uint32_t part,
                             std::uint32_t parts) {
  const auto hidden = static_cast<std::uint32_t>(format.hidden);
  const RowSource<C> source{args.send.x + token * args.send.x_pitch, format.dtype,
                            hidden * bytes_of(format.dtype)};
  const float of_row = row_scale<C>(format, source);
  const Part pieces = part_of(num_pieces<C>(format), part, parts);
  encode_pieces<C>(format, source, of_row, pieces.begin, pieces.end,
                   [&](std::uint32_t element, const Encoded<C>& encoded) {
                     BlockScaleOf scale{};
                     if constexpr (C::kQuantised) {
                       scale = block_scale_of(format, places.scales.rows, element, encoded.scale);
                     }
                     places.for_each([&](std::byte* to, std::byte* scales) {
                       if (element >= hidden) return;
                       store_encoded<C>(format, to, element, encoded);
                       if (C::kQuantised)
                         store_block_scale(format, scales, places.scales.rows, scale);
                     });
                   });
  if (C::kQuantised && part == 0 && has_row_scale(format.wire)) places.store_whole(of_row);
}

// 16 bytes of a row of which `left` bytes are left.
__device__ uint4 load_bytes(const std::byte* from, std::uint32_t left) {
  if (reinterpret_cast<std::uintptr_t>(from) % 16 == 0 && left >= 16) {
    return *reinterpret_cast<const uint4*>(from);
  }
  std::uint32_t words[4] = {};
#pragma unroll
  for (std::uint32_t at = 0; at < 16; ++at) {
    if (at < left) words[at / 4] |= static_cast<std::uint32_t>(from[at]) << (at % 4 * 8);
  }
  return {words[0], words[1], words[2], words[3]};
}
// The scales of a row that the caller has converted, from its plane to those of the places.
__device__ void pass_scales(const DispatchSendArgs& args, const WireFormat& format,
                            const Places& places, std::uint32_t token) {
  const std::int64_t tokens = args.plan.tokens;
  const bool words = format.scale_type == ScaleType::f32;
  const std::int64_t count = num_scale_places(format);
  for (std::int64_t first = 0; first < count; first += kWarpLanes) {
    const std::int64_t block = first + lane_index();
    std::uint32_t scale = 0;
    if (block < count) {
      const std::byte* from = args.send.x_scales + scale_place(format, tokens, token, block);
      scale =
          words ? *reinterpret_cast<const std::uint32_t*>(from) : static_cast<std::uint32_t>(*from);
    }
    const std::int64_t distance = scale_distance(format, places.scales.rows, block);
    places.for_each([&](std::byte*, std::byte* scales) {
      if (block < count) store_scale(format, scales + distance, scale);
    });
  }
  if (format.wire != Wire::nvfp4) return;
  places.store_whole(float_at(args.send.x_scales + row_scale_place(format, tokens, token)));
}
__device__ void pass_part(const DispatchSendArgs& args, const WireFormat& format,
                          const Places& places, std::uint32_t token, std::uint32_t part,
                          std::uint32_t parts) {
  const auto bytes = static_cast<std::uint32_t>(format.payload_bytes);
  const std::byte* from = args.send.x + token * args.send.x_pitch;
  const Part units = part_of((bytes + 15) / 16, part, parts);
  for (std::uint32_t first = units.begin; first < units.end; first += kWarpLanes) {
    const std::uint32_t at = first + static_cast<std::uint32_t>(lane_index());
    uint4 unit{};
    if (at < units.end) unit = load_bytes(from + at * 16, bytes - at * 16);
    places.for_each([&](std::byte* to, std::byte*) {
      if (at < units.end) reinterpret_cast<uint4*>(to)[at] = unit;
    });
  }
  if (part == 0 && format.scale_type != ScaleType::none) pass_scales(args, format, places, token);
}

template <typename C>
__global__ void __launch_bounds__(kThreads)
    dispatch_send_converted(const __grid_constant__ RankTable<DispatchSendArgs> table,
                            const __grid_constant__ WireFormat format, std::uint32_t parts) {
  const DispatchSendArgs& args = table.rank[blockIdx.y];
  const DispatchBegin begin = begin_dispatch_send(args);
  if (begin.failed) return;

  const int lane = lane_index();
  const std::uint32_t count = static_cast<std::uint32_t>(args.plan.tokens) * parts;
  Items items(*args.context.state, Arrival::dispatch_sent, count,
              blockIdx.x * kWarps + static_cast<std::uint32_t>(warp_index()), gridDim.x * kWarps);
  for (std::uint32_t item = items.next(); item < count; item = items.next()) {
    const std::uint32_t token = item / parts;
    const std::uint32_t part = item % parts;
    const Choice choice = load_choice(args.plan, args.context.topk, token, lane);
    const Places places = places_of(args, format, choice, begin.fills, lane);
    if (args.send.converted) {
      pass_part(args, format, places, token, part, parts);
    } else if (places.destinations.lanes != 0) {
      convert_part<C>(args, format, places, token, part, parts);
    }
    if (args.send.entries && part == 0) {
      write_entries(args.context, args.send, choice, places.destinations.first_of_rank, lane);
    }
  }
  finish_dispatch_send(args, begin);
}

template <typename C>
cudaError_t launch(const RankTable<DispatchSendArgs>& table, int ranks,
                   const ConversionShape& shape, const WireFormat& format, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(shape.blocks), static_cast<unsigned>(ranks));
  dispatch_send_converted<C>
      <<<grid, kThreads, 0, stream>>>(table, format, static_cast<std::uint32_t>(shape.parts));
  return cudaGetLastError();
}

}  // namespace

ConversionShape choose_conversion_shape(const ConversionJob& job) {
  // Whole rows where there are warps enough; else parts of at least one piece. Where a part must read the
  // whole row for its scale, no more of them than there are warps without work.
  constexpr std::int64_t kPieceElements = Codec<float, true>::kPieceElements;
  const std::int64_t pieces = (job.hidden + kPieceElements - 1) / kPieceElements;
  const std::int64_t warps = std::int64_t{job.num_sms} * kWarps;
  const std::int64_t items = has_row_scale(job.wire) ? warps : 4 * warps;
  const std::int64_t tokens = job.tokens > 0 ? job.tokens : 1;
  const std::int64_t wanted = items / tokens;
  const std::int64_t parts = wanted < pieces ? wanted : pieces;
  return {job.num_sms, static_cast<int>(parts > 1 ? parts : 1)};
}

cudaError_t launch_dispatch_send_converted(const RankTable<DispatchSendArgs>& table, int ranks,
                                           const ConversionShape& shape, const WireFormat& format,
                                           cudaStream_t stream) {
  return with_codec(format,
                    [&]<typename C>() { return launch<C>(table, ranks, shape, format, stream); });
}

}  // namespace wherry::kernels::cuda
