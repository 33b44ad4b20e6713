#include "rank.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

namespace wherry::bench {

namespace {

constexpr int kThreads = 256;
constexpr int kBlocks = 512;
constexpr Error::Where kWhere{};

__global__ void fill_rows(std::byte* x, DType dtype, int tokens, int hidden, int rank) {
  for (int token = static_cast<int>(blockIdx.x); token < tokens;
       token += static_cast<int>(gridDim.x)) {
    for (int column = static_cast<int>(threadIdx.x); column < hidden; column += kThreads) {
      store_bits(dtype, x,
                 static_cast<std::size_t>(token) * static_cast<std::size_t>(hidden) +
                     static_cast<std::size_t>(column),
                 payload(dtype, rank, token, column));
    }
  }
}

__device__ void note(Mismatches* found, unsigned long long* counter, int kind, int rank, int row,
                     int column, int expected, int got) {
  if (atomicAdd(counter, 1ULL) != 0) return;
  const int values[6] = {kind, rank, row, column, expected, got};
  for (int i = 0; i < 6; ++i) found->first[i] = values[i];
}

struct ExpertsArgs {
  const std::byte* rows;
  std::byte* results;
  const std::byte* scales;  // null: rows are not quantised
  std::int64_t row_pitch, result_pitch, scale_pitch;
  const Origin* origins;
  int num_origins, rank, hidden;
  DType dtype;
  Mismatches* found;
};

__device__ void check_quantised(const ExpertsArgs& a, int row, const Origin& origin,
                                const std::byte* bytes) {
  const auto* scales = reinterpret_cast<const float*>(a.scales + row * a.scale_pitch);
  for (int block = static_cast<int>(threadIdx.x); block < (a.hidden + 127) / 128;
       block += kThreads) {
    const int end = min(a.hidden, block * 128 + 128);
    float largest = 0.0F;
    for (int c = block * 128; c < end; ++c) {
      largest =
          fmaxf(largest, fabsf(widen(a.dtype, payload(a.dtype, origin.source, origin.token, c))));
    }
    const float scale = largest == 0.0F ? 1.0F : __fdiv_rn(largest, 448.0F);
    const float stored = scales[block];
    if (__float_as_int(scale) != __float_as_int(stored)) {
      note(a.found, &a.found->rows, 1, a.rank, row, block, __float_as_int(scale),
           __float_as_int(stored));
    }
    for (int c = block * 128; c < end; ++c) {
      const float x = widen(a.dtype, payload(a.dtype, origin.source, origin.token, c));
      const int expected = to_e4m3(__fdiv_rn(x, scale));
      const int got = static_cast<int>(bytes[c]);
      if (expected != got) note(a.found, &a.found->rows, 2, a.rank, row, c, expected, got);
    }
  }
}

// Compares each received row with its origin's payload and writes what its expert makes of it.
__global__ void run_experts(ExpertsArgs a) {
  for (int row = static_cast<int>(blockIdx.x); row < a.num_origins;
       row += static_cast<int>(gridDim.x)) {
    const Origin origin = a.origins[row];
    if (origin.source < 0) continue;
    const std::byte* bytes = a.rows + row * a.row_pitch;
    std::byte* out = a.results + row * a.result_pitch;
    if (a.scales != nullptr) check_quantised(a, row, origin, bytes);
    for (int c = static_cast<int>(threadIdx.x); c < a.hidden; c += kThreads) {
      const auto column = static_cast<std::size_t>(c);
      const std::uint32_t expected = payload(a.dtype, origin.source, origin.token, c);
      const std::uint32_t got = a.scales != nullptr ? expected : load_bits(a.dtype, bytes, column);
      if (got != expected) {
        note(a.found, &a.found->rows, 0, a.rank, row, c, static_cast<int>(expected),
             static_cast<int>(got));
      }
      store_bits(a.dtype, out, column, got ^ expert_bits(a.dtype, origin.expert));
    }
  }
}

struct SumsArgs {
  const std::byte* out;
  SumRule rule;
  int rank, tokens, hidden;
  const std::int32_t* dest;
  const std::int32_t* ids;
  const float* weights;
  Mismatches* found;
};
__global__ void compare_sums(SumsArgs a) {
  for (int token = static_cast<int>(blockIdx.x); token < a.tokens;
       token += static_cast<int>(gridDim.x)) {
    const int first = token * a.rule.topk;
    for (int c = static_cast<int>(threadIdx.x); c < a.hidden; c += kThreads) {
      const std::uint32_t expected =
          expected_sum(a.rule, a.rank, token, c, a.dest + first, a.ids + first, a.weights + first);
      const std::uint32_t got =
          load_bits(a.rule.dtype, a.out,
                    static_cast<std::size_t>(token) * static_cast<std::size_t>(a.hidden) +
                        static_cast<std::size_t>(c));
      if (got != expected) {
        note(a.found, &a.found->sums, 5, a.rank, token, c, static_cast<int>(expected),
             static_cast<int>(got));
      }
    }
  }
}

template <typename T>
cuda::DeviceMemory upload(int ordinal, const std::vector<T>& values) {
  cuda::DeviceMemory memory(ordinal, values.size() * sizeof(T));
  // Not cudaMemcpy, which returns when all is on its way: other streams do not wait for it.
  cuda::SideStream(ordinal).write(memory.get(), values.data(), values.size() * sizeof(T));
  return memory;
}

// Of all ranks, the most that one receives.
std::int64_t most_rows(const GpuShape& shape) {
  std::int64_t most = 1;
  for (int rank = 0; rank < shape.ranks; ++rank) {
    most = std::max(most, static_cast<std::int64_t>(origins_of(shape, rank).size()));
  }
  return most;
}

ExchangeConfig config_of(const GpuShape& shape) {
  ExchangeConfig config;
  config.experts = shape.experts;
  config.topk = shape.topk;
  config.hidden = shape.hidden;
  config.max_tokens = shape.tokens;
  config.dtype = shape.dtype;
  config.layout = shape.layout;
  config.reduction = shape.reduction;
  if (shape.reduction == Reduction::by_rank) config.sum_at = shape.sum_at;
  if (shape.e4m3) config.dispatch_wire = Wire::e4m3_block128;
  // No more than comes: the most that could come does not fit 8 times.
  if (shape.layout == Layout::grouped) config.receive_rows = most_rows(shape);
  config.depth = shape.depth;
  config.deadline = Seconds(shape.deadline);
  config.num_sms = shape.num_sms;
  config.kernels = shape.kernels;
  return config;
}

}  // namespace

RankOnGpu::RankOnGpu(const Group& group, int ordinal, cudaStream_t stream, const GpuShape& shape)
    : shape_(shape),
      ordinal_(ordinal),
      rank_(group.rank()),
      stream_(stream),
      exchange_(group, Device::cuda(ordinal), config_of(shape)),
      x_(ordinal, static_cast<std::size_t>(shape.tokens) * shape.x_bytes()),
      sums_(ordinal, static_cast<std::size_t>(shape.tokens) * shape.x_bytes()),
      found_(ordinal, sizeof(Mismatches)) {
  exchange_.set_stream(stream);
  for (int i = 0; i < shape.depth; ++i) plans_.push_back(exchange_.make_plan());
  const Choices choices = draw_choices(shape, rank_);
  std::vector<std::int32_t> dest;
  for (const std::int32_t id : choices.ids) dest.push_back(rank_of_expert(shape, id));
  const std::vector<Origin> origins = origins_of(shape, rank_);
  ids_ = upload(ordinal, choices.ids);
  weights_ = upload(ordinal, choices.weights);
  dest_ = upload(ordinal, dest);
  origins_ = upload(ordinal, origins);
  num_origins_ = static_cast<int>(origins.size());
  fill_rows<<<kBlocks, kThreads, 0, stream>>>(x_.get(), shape.dtype, shape.tokens, shape.hidden,
                                              rank_);
  cuda::check(cudaGetLastError(), kWhere, "fill_rows");
}

ConstTensorView RankOnGpu::x() const {
  return {x_.get(), shape_.dtype, shape_.tokens, shape_.hidden};
}
TensorView RankOnGpu::sums() const {
  TensorView view;
  view.data = sums_.get();
  view.dtype = shape_.dtype;
  view.rows = shape_.tokens;
  view.cols = shape_.hidden;
  return view;
}

void RankOnGpu::plan() {
  exchange_.plan({reinterpret_cast<const std::int32_t*>(ids_.get()),
                  reinterpret_cast<const float*>(weights_.get()), shape_.tokens, shape_.topk},
                 plans_[next_]);
}
void RankOnGpu::dispatch() { received_ = exchange_.dispatch(plans_[next_], x()); }
void RankOnGpu::plan_dispatch() {
  received_ = exchange_.plan_dispatch(
      {reinterpret_cast<const std::int32_t*>(ids_.get()),
       reinterpret_cast<const float*>(weights_.get()), shape_.tokens, shape_.topk},
      plans_[next_], x());
}
void RankOnGpu::combine() {
  exchange_.combine(plans_[next_], exchange_.combine_input(plans_[next_]), sums());
  next_ = (next_ + 1) % plans_.size();
}

void RankOnGpu::check_rows(const Received& received) {
  const TensorView results = exchange_.combine_input(plans_[next_]);
  run_experts<<<kBlocks, kThreads, 0, stream_>>>(
      {static_cast<const std::byte*>(received.rows.data), static_cast<std::byte*>(results.data),
       static_cast<const std::byte*>(received.scales), received.rows.pitch(), results.pitch(),
       received.wire.scale_pitch(), reinterpret_cast<const Origin*>(origins_.get()), num_origins_,
       rank_, shape_.hidden, shape_.dtype, reinterpret_cast<Mismatches*>(found_.get())});
  cuda::check(cudaGetLastError(), kWhere, "run_experts");
}

void RankOnGpu::checked_step() {
  cuda::check(cudaMemsetAsync(sums_.get(), 0xFF, sums_.bytes(), stream_), kWhere, "cudaMemset");
  plan_dispatch();
  check_rows(received_);
  combine();
  compare_sums<<<kBlocks, kThreads, 0, stream_>>>(
      {sums_.get(),
       {shape_.layout, shape_.reduction, shape_.dtype, shape_.ranks, shape_.topk, shape_.experts},
       rank_,
       shape_.tokens,
       shape_.hidden,
       reinterpret_cast<const std::int32_t*>(dest_.get()),
       reinterpret_cast<const std::int32_t*>(ids_.get()),
       reinterpret_cast<const float*>(weights_.get()),
       reinterpret_cast<Mismatches*>(found_.get())});
  cuda::check(cudaGetLastError(), kWhere, "compare_sums");
  cuda::check(cudaStreamSynchronize(stream_), kWhere, "a checked step");
  exchange_.check();
  Mismatches found;
  cuda::check(cudaMemcpy(&found, found_.get(), sizeof(found), cudaMemcpyDeviceToHost), kWhere,
              "cudaMemcpy");
  if (found.rows + found.sums == 0) return;
  const int* f = found.first;
  throw std::runtime_error("rank " + std::to_string(rank_) + ": " + std::to_string(found.rows) +
                           " row and " + std::to_string(found.sums) +
                           " sum mismatches; first: kind " + std::to_string(f[0]) + " row " +
                           std::to_string(f[2]) + " column " + std::to_string(f[3]) + " expected " +
                           std::to_string(f[4]) + " found " + std::to_string(f[5]));
}

std::int64_t rows_sent(const GpuShape& shape) {
  std::int64_t rows = 0;
  for (int rank = 0; rank < shape.ranks; ++rank) {
    for (const Origin& origin : origins_of(shape, rank)) rows += origin.source >= 0 ? 1 : 0;
  }
  return rows;
}

}  // namespace wherry::bench
