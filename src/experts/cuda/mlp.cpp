#include "experts/cuda/mlp.hpp"

#include <algorithm>
#include <cstring>

#include "kernels/cuda/experts.hpp"
#include "kernels/layout.hpp"
#include "support/check.hpp"

namespace wherry {

std::unique_ptr<Mlp> experts::make_cuda_mlp(Device device, const ExpertsConfig& config,
                                            std::span<const int> experts,
                                            const WeightSource& fill) {
  return std::make_unique<cuda::CudaMlp>(device, config, experts, fill);
}

namespace cuda {

namespace {

constexpr Error::Where kWhere{Stage::experts, -1, -1};
constexpr std::int64_t kPaddedTo = 8;  // elements: 16 bytes of bf16, 32 of f32

std::int64_t padded(std::int64_t elements) {
  return (elements + kPaddedTo - 1) / kPaddedTo * kPaddedTo;
}
cudaDataType type_of(DType dtype) { return dtype == DType::bf16 ? CUDA_R_16BF : CUDA_R_32F; }

kernels::cuda::RowsAt rows_at(const void* data, std::int64_t pitch_bytes) {
  return {static_cast<std::byte*>(const_cast<void*>(data)),
          static_cast<std::uint64_t>(pitch_bytes)};
}

}  // namespace

CudaMlp::CudaMlp(Device device, const ExpertsConfig& config_in, std::span<const int> experts,
                 const WeightSource& fill)
    : Mlp(config_in, experts.size()),
      device_(device),
      element_(dtype_bytes(config.dtype)),
      width_(padded(config.expert_hidden)),
      padded_hidden_(padded(config.hidden)),
      cublas_(device.ordinal),
      inward_(device.ordinal,
              static_cast<std::size_t>(num_slots * 2 * width_ * padded_hidden_ * element_)),
      outward_(device.ordinal,
               static_cast<std::size_t>(num_slots * config.hidden * width_ * element_)),
      pointers_(device.ordinal, 3 * static_cast<std::size_t>(num_slots) * sizeof(void*)) {
  implementation = {"cublas", fmt::format("cuBLAS {}", cublas_.version())};
  upload(experts, fill);
}

CudaMlp::~CudaMlp() {
  // What goes away here may still be in use. An error was reported when it came.
  try {
    const DeviceGuard guard(device_.ordinal);
    if (cudaStreamSynchronize(stream_) != cudaSuccess) static_cast<void>(cudaGetLastError());
  } catch (const Error&) {
    return;
  }
}

void CudaMlp::set_stream(void* stream) {
  const DeviceGuard guard(device_.ordinal);
  stream_ = static_cast<cudaStream_t>(stream);
  cublas_.set_stream(stream_);
}

void CudaMlp::upload(std::span<const int> experts, const WeightSource& fill) {
  const DeviceGuard guard(device_.ordinal);
  std::vector<std::byte> plain(
      static_cast<std::size_t>(config.hidden * config.expert_hidden * element_));
  for (std::int64_t slot = 0; slot < num_slots; ++slot) {
    for (const Matrix which : {Matrix::gate, Matrix::up, Matrix::down}) {
      const bool down = which == Matrix::down;
      TensorView view;
      view.data = plain.data();
      view.dtype = config.dtype;
      view.rows = down ? config.hidden : config.expert_hidden;
      view.cols = down ? config.expert_hidden : config.hidden;
      fill(experts[static_cast<std::size_t>(slot)], which, view);
      const std::int64_t pitch = (down ? width_ : padded_hidden_) * element_;
      std::byte* const to =
          down ? outward_.get() + slot * config.hidden * pitch
               : inward_.get() + (slot * 2 + (which == Matrix::up ? 1 : 0)) * width_ * pitch;
      cuda::check(cudaMemcpy2D(to, static_cast<std::size_t>(pitch), plain.data(),
                               static_cast<std::size_t>(view.row_bytes()),
                               static_cast<std::size_t>(view.row_bytes()),
                               static_cast<std::size_t>(view.rows), cudaMemcpyHostToDevice),
                  kWhere, "copy the weights of the experts");
    }
  }
}

std::byte* CudaMlp::at_least(DeviceMemory& memory, std::size_t bytes) {
  if (memory.bytes() < bytes) {
    cuda::check(cudaStreamSynchronize(stream_), kWhere, "cudaStreamSynchronize");
    memory = DeviceMemory();  // before the larger one is taken
    memory = DeviceMemory(device_.ordinal, bytes);
  }
  return memory.get();
}

// cuBLAS counts columns first: its matrices are ours, transposed.
void CudaMlp::multiply_segments(const Product& p, std::span<const std::int64_t> begin,
                                std::span<const std::int64_t> counts) {
  const auto slots = static_cast<std::size_t>(num_slots);
  std::vector<const void*> pointers(3 * slots);
  std::vector<int> rows;
  for (std::size_t slot = 0; slot < slots; ++slot) {
    if (counts[slot] == 0) continue;
    const std::size_t group = rows.size();
    const auto at = static_cast<std::int64_t>(slot);
    pointers[group] = p.weights + at * p.slot_stride * element_;
    pointers[slots + group] = p.rows + begin[slot] * p.row_pitch * element_;
    pointers[2 * slots + group] = p.out + begin[slot] * p.out_pitch * element_;
    rows.push_back(static_cast<int>(counts[slot]));
  }
  if (rows.empty()) return;
  // From memory that is not pinned the copy has been taken when the call returns.
  cuda::check(cudaMemcpyAsync(pointers_.get(), static_cast<const void*>(pointers.data()),
                              pointers.size() * sizeof(void*), cudaMemcpyHostToDevice, stream_),
              kWhere, "copy the addresses of the rows");
  const std::size_t groups = rows.size();
  const auto all = [&](std::int64_t value) {
    return std::vector<int>(groups, static_cast<int>(value));
  };
  const std::vector<cublasOperation_t> transposed(groups, CUBLAS_OP_T);
  const std::vector<cublasOperation_t> as_it_is(groups, CUBLAS_OP_N);
  const std::vector<float> one(groups, 1.0F);
  const std::vector<float> zero(groups, 0.0F);
  const auto* const on_device = reinterpret_cast<const void* const*>(pointers_.get());
  const cudaDataType type = type_of(config.dtype);
  cublas_.check(
      cublas_.functions().grouped(
          cublas_.handle(), transposed.data(), as_it_is.data(), all(p.cols).data(), rows.data(),
          all(p.inner).data(), one.data(), on_device, type, all(p.weight_pitch).data(),
          on_device + slots, type, all(p.row_pitch).data(), zero.data(),
          reinterpret_cast<void* const*>(pointers_.get()) + 2 * slots, type,
          all(p.out_pitch).data(), static_cast<int>(groups), all(1).data(), CUBLAS_COMPUTE_32F),
      "cublasGemmGroupedBatchedEx");
}

void CudaMlp::multiply_slots(const Product& p, std::int64_t rows_per_slot) {
  const float one = 1.0F;
  const float zero = 0.0F;
  const cudaDataType type = type_of(config.dtype);
  cublas_.check(cublas_.functions().strided(
                    cublas_.handle(), CUBLAS_OP_T, CUBLAS_OP_N, static_cast<int>(p.cols),
                    static_cast<int>(rows_per_slot), static_cast<int>(p.inner), &one, p.weights,
                    type, static_cast<int>(p.weight_pitch), p.slot_stride, p.rows, type,
                    static_cast<int>(p.row_pitch), rows_per_slot * p.row_pitch, &zero, p.out, type,
                    static_cast<int>(p.out_pitch), rows_per_slot * p.out_pitch,
                    static_cast<int>(num_slots), CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
                "cublasGemmStridedBatchedEx");
}

CudaMlp::Product CudaMlp::product_in(ConstTensorView rows, std::byte* gate_up) const {
  return {inward_.get(),           padded_hidden_, 2 * width_ * padded_hidden_,
          config.hidden,           2 * width_,     static_cast<const std::byte*>(rows.data),
          rows.pitch() / element_, gate_up,        2 * width_};
}

CudaMlp::Product CudaMlp::product_out(const std::byte* activations, TensorView out) const {
  return {outward_.get(),
          width_,
          config.hidden * width_,
          width_,
          config.hidden,
          activations,
          width_,
          static_cast<std::byte*>(out.data),
          out.pitch() / element_};
}

// multiply(product) of rows [0, num_rows), inward and outward, with the activation between them.
template <typename Multiply>
void CudaMlp::run(ConstTensorView rows, std::int64_t num_rows, TensorView out,
                  const Multiply& multiply) {
  if (num_rows == 0 || num_slots == 0) return;
  for (const std::int64_t pitch : {rows.pitch(), out.pitch()}) {
    WHERRY_CHECK_ARGUMENT(pitch % element_ == 0, Stage::experts,
                          "a pitch is {} bytes; it must be a multiple of the {} of an element",
                          pitch, element_);
  }
  const auto bytes = static_cast<std::size_t>(num_rows * width_ * element_);
  std::byte* const gate_up = at_least(gate_up_, 2 * bytes);
  std::byte* const activations = at_least(activations_, bytes);
  multiply(product_in(rows, gate_up));
  cuda::check(kernels::cuda::launch_silu_times(
                  config.dtype, rows_at(gate_up, 2 * width_ * element_),
                  rows_at(activations, width_ * element_), num_rows, width_, stream_),
              kWhere, "launch");
  multiply(product_out(activations, out));
}

void CudaMlp::forward(ConstTensorView rows, std::span<const std::int64_t> slot_begin,
                      std::span<const std::int64_t> slot_counts, TensorView out) {
  const DeviceGuard guard(device_.ordinal);
  std::int64_t end = 0;
  for (std::size_t slot = 0; slot < slot_counts.size(); ++slot) {
    if (slot_counts[slot] > 0) end = std::max(end, slot_begin[slot] + slot_counts[slot]);
  }
  run(rows, end, out,
      [&](const Product& product) { multiply_segments(product, slot_begin, slot_counts); });
}

void CudaMlp::forward_all_slots(ConstTensorView rows, std::int64_t rows_per_slot, TensorView out) {
  const DeviceGuard guard(device_.ordinal);
  run(rows, num_slots * rows_per_slot, out,
      [&](const Product& product) { multiply_slots(product, rows_per_slot); });
}

void CudaMlp::forward_gathered(const Received& received, TensorView out) {
  const std::int64_t positions = received.slot_begin[static_cast<std::size_t>(num_slots)];
  const std::int64_t rows = received.rows.rows;
  if (rows == 0) return;
  const DeviceGuard guard(device_.ordinal);
  const std::int64_t pitch = padded_hidden_ * element_;
  const auto bytes = static_cast<std::size_t>(positions * pitch);
  TensorView gathered;
  gathered.data = at_least(gathered_, bytes);
  gathered.dtype = config.dtype;
  gathered.rows = positions;
  gathered.cols = config.hidden;
  gathered.pitch_bytes = pitch;
  TensorView results = gathered;
  results.data = at_least(results_, bytes);
  const auto row = static_cast<std::uint64_t>(row_bytes());
  cuda::check(kernels::cuda::launch_gather(rows_at(received.rows.data, received.rows.pitch()),
                                           rows_at(gathered.data, pitch), received.device.gather,
                                           positions, row, stream_),
              kWhere, "launch");
  forward(gathered, received.slot_begin, received.slot_counts, results);
  cuda::check(kernels::cuda::launch_sum_choices(
                  config.dtype, rows_at(results.data, pitch), rows_at(out.data, out.pitch()),
                  received.device.choices, received.device.topk, rows, row, stream_),
              kWhere, "launch");
}

}  // namespace cuda
}  // namespace wherry
