// The experts of one rank on one kind of device: what GatedMlp has checked its calls for and passes on.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "wherry/experts.hpp"

namespace wherry {

// Each as the function of GatedMlp with its name.
class Mlp {
 public:
  Mlp(const ExpertsConfig& config_in, std::size_t experts_in)
      : config(config_in),
        num_slots(static_cast<std::int64_t>(experts_in)) {}
  virtual ~Mlp() = default;
  Mlp(const Mlp&) = delete;
  Mlp& operator=(const Mlp&) = delete;

  [[nodiscard]] virtual Device device() const noexcept { return Device::cpu(); }
  virtual void set_stream(void* /*stream*/) {}
  [[nodiscard]] virtual std::uint64_t weight_bytes() const noexcept = 0;

  virtual void forward(ConstTensorView rows, std::span<const std::int64_t> slot_begin,
                       std::span<const std::int64_t> slot_counts, TensorView out) = 0;
  virtual void forward_gathered(const Received& received, TensorView out) = 0;
  // Layout `slots` where the host knows no counts: every row of every slot.
  virtual void forward_all_slots(ConstTensorView rows, std::int64_t rows_per_slot, TensorView out) {
    const std::vector<std::int64_t> counts(static_cast<std::size_t>(num_slots), rows_per_slot);
    forward(rows, begin_of_slots(rows_per_slot), counts, out);
  }

  // The first row of each slot in layout `slots`, [num_slots].
  [[nodiscard]] std::vector<std::int64_t> begin_of_slots(std::int64_t rows_per_slot) const {
    std::vector<std::int64_t> begin(static_cast<std::size_t>(num_slots));
    for (std::size_t slot = 0; slot < begin.size(); ++slot) {
      begin[slot] = static_cast<std::int64_t>(slot) * rows_per_slot;
    }
    return begin;
  }

  const ExpertsConfig config;
  const std::int64_t num_slots;
  GatedMlp::Implementation implementation;

 protected:
  [[nodiscard]] std::int64_t row_bytes() const noexcept {
    return config.hidden * dtype_bytes(config.dtype);
  }
};

namespace experts {

// Throw as the constructors of GatedMlp do.
[[nodiscard]] std::unique_ptr<Mlp> make_cpu_mlp(const ExpertsConfig& config,
                                                std::span<const int> experts,
                                                const WeightSource& fill);
[[nodiscard]] std::unique_ptr<Mlp> make_cuda_mlp(Device device, const ExpertsConfig& config,
                                                 std::span<const int> experts,
                                                 const WeightSource& fill);

}  // namespace experts
}  // namespace wherry
