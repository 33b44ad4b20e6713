// A plan in the memory of a GPU.
#pragma once

#include <memory>

#include "exchange/config.hpp"
#include "kernels/cuda/args.hpp"
#include "plan/device.hpp"
#include "support/cuda.hpp"

namespace wherry::cuda {

// What of an exchange its plans need, also after it is gone.
struct PlanOwner {
  PlanOwner(const ExchangeConfig& config_in, const Placement& placement_in, int rank_in,
            int ordinal_in);

  ExchangeConfig config;
  Placement placement;  // of construction: slots stay what they are
  Capacity capacity;
  int rank;
  int ordinal;
  SideStream side;
  PinnedMemory pinned;  // the fault word, then the PlanReport that the host has not seen

  [[nodiscard]] std::uint64_t* fault_record() const noexcept;
  [[nodiscard]] kernels::cuda::PlanReport* report() const noexcept;
  // Whether the report is there.
  [[nodiscard]] bool has_report() const noexcept;
};

// The sentence for a plan that carries nothing.
[[nodiscard]] Error error_of(const kernels::cuda::PlanReport& report, const PlanOwner& owner);

class CudaPlan final : public DevicePlan {
 public:
  explicit CudaPlan(std::shared_ptr<PlanOwner> owner);
  ~CudaPlan() override;

  [[nodiscard]] const PlanData& to_host() override;
  [[nodiscard]] bool ready() override;

  // `tokens` of a call of plan(). The arrays stay where they are.
  [[nodiscard]] kernels::cuda::PlanArrays arrays() const noexcept { return arrays_; }
  // Called when plan() has been launched, and filled_event() recorded behind it.
  void filled(std::int64_t tokens, std::uint64_t serial, std::uint64_t placement);
  [[nodiscard]] cudaEvent_t filled_event() const noexcept { return filled_; }

  [[nodiscard]] const PlanOwner* owner() const noexcept { return owner_.get(); }
  [[nodiscard]] std::int64_t tokens() const noexcept { return arrays_.tokens; }
  [[nodiscard]] std::uint64_t serial() const noexcept { return serial_; }  // 0: not filled yet
  [[nodiscard]] std::uint64_t placement() const noexcept { return placement_; }

 private:
  void read();

  std::shared_ptr<PlanOwner> owner_;
  DeviceMemory memory_;
  kernels::cuda::PlanArrays arrays_{};
  cudaEvent_t filled_ = nullptr;
  std::uint64_t serial_ = 0;
  std::uint64_t placement_ = 0;
  PlanData data_;
};

}  // namespace wherry::cuda
