// Experts on a GPU. Weights lie as they are multiplied, one expert behind the other:
//
//   inward   [slots][2 * width, hidden]  gate, then up: one multiplication
//   outward  [slots][hidden, width]      down
//
// `width` is expert_hidden, and rows of weights are hidden or width, rounded up to 8 elements with zeros,
// so that every row begins on 16 bytes.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "experts/cuda/cublas.hpp"
#include "experts/mlp.hpp"
#include "support/cuda.hpp"

namespace wherry::cuda {

class CudaMlp final : public Mlp {
 public:
  CudaMlp(Device device, const ExpertsConfig& config_in, std::span<const int> experts,
          const WeightSource& fill);
  ~CudaMlp() override;

  [[nodiscard]] Device device() const noexcept override { return device_; }
  void set_stream(void* stream) override;
  [[nodiscard]] std::uint64_t weight_bytes() const noexcept override {
    return inward_.bytes() + outward_.bytes();
  }

  void forward(ConstTensorView rows, std::span<const std::int64_t> slot_begin,
               std::span<const std::int64_t> slot_counts, TensorView out) override;
  void forward_gathered(const Received& received, TensorView out) override;
  void forward_all_slots(ConstTensorView rows, std::int64_t rows_per_slot, TensorView out) override;

 private:
  void upload(std::span<const int> experts, const WeightSource& fill);
  // A buffer that is at least so large. Grows it after the stream's work with it is done.
  std::byte* at_least(DeviceMemory& memory, std::size_t bytes);

  // outputs [*, cols] = rows [*, inner] * weights of the slot [cols, inner] for each segment.
  struct Product {
    const std::byte* weights;
    std::int64_t weight_pitch;  // elements, as all pitches here
    std::int64_t slot_stride;
    std::int64_t inner, cols;
    const std::byte* rows;
    std::int64_t row_pitch;
    std::byte* out;
    std::int64_t out_pitch;
  };
  void multiply_segments(const Product& product, std::span<const std::int64_t> begin,
                         std::span<const std::int64_t> counts);
  void multiply_slots(const Product& product, std::int64_t rows_per_slot);
  [[nodiscard]] Product product_in(ConstTensorView rows, std::byte* gate_up) const;
  [[nodiscard]] Product product_out(const std::byte* activations, TensorView out) const;
  template <typename Multiply>
  void run(ConstTensorView rows, std::int64_t num_rows, TensorView out, const Multiply& multiply);

  Device device_;
  cudaStream_t stream_ = nullptr;
  std::int64_t element_, width_, padded_hidden_;
  Cublas cublas_;
  DeviceMemory inward_, outward_;
  DeviceMemory gate_up_, activations_;  // of as many rows as a call had
  DeviceMemory gathered_, results_;     // forward_gathered
  DeviceMemory pointers_;               // [3][slots]: weights, rows, results of a segment
};

}  // namespace wherry::cuda
