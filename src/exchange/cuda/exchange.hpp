// An exchange on a GPU: drives the kernels of src/kernels/cuda. The host keeps the order of the halves and
// the phases of the generations, as on the CPU (exchange/state.hpp); epochs and counts stay on the device.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "exchange/cuda/launches.hpp"
#include "exchange/cuda/plan.hpp"
#include "exchange/device.hpp"
#include "exchange/window.hpp"
#include "fabric/cuda_peer/fabric.hpp"
#include "kernels/cuda/args.hpp"
#include "kernels/stages.hpp"

namespace wherry::cuda {

class CudaExchange final : public DeviceExchange {
 public:
  CudaExchange(const Group& group, Device device, const ExchangeConfig& config);
  ~CudaExchange() override;

  [[nodiscard]] Device device() const noexcept override { return device_; }
  [[nodiscard]] const ExchangeConfig& config() const noexcept override { return owner_->config; }
  [[nodiscard]] const Placement& placement() const noexcept override { return placement_; }
  [[nodiscard]] int rank() const noexcept override { return owner_->rank; }
  [[nodiscard]] int size() const noexcept override { return placement_.num_ranks(); }
  [[nodiscard]] std::string_view kernels() const noexcept override {
    if (!bulk_) return "cuda_copy";
    return one_gpu_ && over_link_ ? "cuda_link" : "cuda";
  }
  [[nodiscard]] std::string_view fabric() const noexcept override { return fabric_->name(); }
  [[nodiscard]] std::uint64_t window_bytes() const noexcept override {
    return context_.layout.bytes;
  }

  void set_stream(void* stream) override { stream_ = static_cast<cudaStream_t>(stream); }
  [[nodiscard]] std::shared_ptr<DevicePlan> make_plan() override;
  void plan(const Routing& routing, DevicePlan& plan) override;
  [[nodiscard]] std::uint64_t dispatch_begin(DevicePlan& plan, const ConstTensorView& x,
                                             const DispatchOptions& options) override;
  [[nodiscard]] Received dispatch_finish(std::uint64_t step) override;
  Received dispatch(DevicePlan& plan, const ConstTensorView& x,
                    const DispatchOptions& options) override;
  Received plan_dispatch(const Routing& routing, DevicePlan& plan, const ConstTensorView& x,
                         const DispatchOptions& options) override;
  [[nodiscard]] TensorView combine_input(DevicePlan& plan) override;
  [[nodiscard]] std::uint64_t combine_begin(DevicePlan& plan, const ConstTensorView& y,
                                            const TensorView& out,
                                            const CombineOptions& options) override;
  void combine_finish(std::uint64_t step) override;
  void combine(DevicePlan& plan, const ConstTensorView& y, const TensorView& out,
               const CombineOptions& options) override;
  void release(const Received& received) override;
  void check() override;
  [[nodiscard]] std::span<const std::int64_t> loads() override;
  void reset_loads() override;
  void set_placement(const Placement& placement) override;

 private:
  enum class Phase : std::uint8_t { unused, sending, received, combining, combined, released };
  struct Generation {
    Phase phase = Phase::unused;
    std::uint64_t step = 0;
    std::uint64_t plan_serial = 0;
    kernels::cuda::PlanArrays plan{};
    TensorView out;   // of dispatch: the caller's memory, or null
    TensorView sums;  // of combine
    ConstTensorView addend;
    float* scalars_out = nullptr;
    kernels::cuda::TokenChoice* choices = nullptr;  // tokens: [token rows, topk]
    std::int32_t* gather = nullptr;                 // tokens
  };

  void take_memory();
  void write_placement();

  // Of every call.
  [[nodiscard]] Error::Where at(Stage stage) const noexcept { return {stage, rank(), -1}; }
  void throw_if_failed() const;
  [[nodiscard]] CudaPlan& own_plan(DevicePlan& plan, Stage stage) const;
  // A filled one of this placement.
  [[nodiscard]] CudaPlan& filled_plan(DevicePlan& plan, Stage stage) const;
  void check_device_memory(Stage stage, const char* argument, const void* pointer) const;
  // Ends the exchange on all ranks: they may be on their way.
  [[noreturn]] void refuse(Stage stage, std::uint64_t step, const std::string& problem);
  void check_tensor(Stage stage, std::uint64_t step, const char* argument,
                    const ConstTensorView& tensor, const TensorView& wanted);
  [[nodiscard]] TensorView wanted(DType dtype, std::int64_t rows, std::int64_t cols) const noexcept;

  [[nodiscard]] std::uint32_t generation_of(std::uint64_t step) const noexcept {
    return static_cast<std::uint32_t>((step - 1) % generations_.size());
  }
  [[nodiscard]] Generation& at_step(std::uint64_t step) noexcept {
    return generations_[generation_of(step)];
  }
  Generation& enter();
  [[nodiscard]] Generation* oldest_uncombined(std::uint64_t plan_serial) noexcept;
  void tell(const kernels::cuda::TellArgs& args, Stage stage);
  // Rows that there is room for.
  [[nodiscard]] std::int64_t room() const noexcept;
  [[nodiscard]] bool fills_on_arrival() const noexcept;
  [[nodiscard]] bool expects_recv() const noexcept;
  // The blocks that send token rows also list those that have come.
  [[nodiscard]] bool lists_with_rows(const ConstTensorView& x) const noexcept;

  [[nodiscard]] kernels::cuda::CountArgs count_args(const Routing& routing,
                                                    const CudaPlan& plan) const;
  void check_dispatch(const CudaPlan* plan, std::int64_t tokens, const ConstTensorView& x,
                      const DispatchOptions& options);
  Generation& begin_dispatch(const CudaPlan& plan, const DispatchOptions& options);
  [[nodiscard]] kernels::cuda::Outgoing outgoing(const Generation& g, const ConstTensorView& x,
                                                 bool receive) const;
  [[nodiscard]] kernels::cuda::ScalarsArgs scalars_of(const Generation& g, const float* from,
                                                      float* to) const;
  [[nodiscard]] kernels::cuda::Lists lists_of(const Generation& g) const;
  void send_rows(const Generation& g, const ConstTensorView& x, bool receive);
  void receive_rows(const Generation& g);
  Received end_dispatch(Generation& g);
  [[nodiscard]] bool fuses(const ConstTensorView& x) const noexcept;
  Generation& begin_combine(DevicePlan& plan, const ConstTensorView& y, const TensorView& out,
                            const CombineOptions& options);
  void send_results(const Generation& g);
  void sum_results(Generation& g, bool send);

  Device device_;
  std::shared_ptr<PlanOwner> owner_;
  Placement placement_;
  kernels::Mode mode_;
  bool bulk_ = false;       // rows may go by bulk copies
  bool one_gpu_ = true;     // all ranks are on this one
  bool over_link_ = false;  // launches are shaped for ranks on several GPUs
  bool overlaps_ = false;   // a launch may begin before the one before it has ended
  int num_sms_ = 0;
  int shared_bytes_ = 0;
  double everywhere_ = 1;  // ranks that a token goes to, on average
  std::unique_ptr<CudaPeerFabric> fabric_;
  std::shared_ptr<Launches> launches_;
  int local_ = 0;  // this rank among those that launch together
  cudaStream_t stream_ = nullptr;

  DeviceMemory memory_;  // of what follows
  kernels::cuda::RankContext context_{};
  kernels::cuda::PlacementArrays placement_arrays_{};
  std::int32_t* placement_memory_ = nullptr;
  std::byte* workspace_ = nullptr;
  std::int64_t* device_loads_ = nullptr;  // [slots]
  std::vector<Generation> generations_;

  std::uint64_t plans_ = 0;
  std::uint64_t steps_ = 0;
  std::uint64_t placements_ = 0;
  std::uint64_t placement_hash_ = 0;
  std::vector<std::int64_t> earlier_loads_;  // [experts] under earlier placements
  std::vector<std::int64_t> loads_;          // [experts]
};

}  // namespace wherry::cuda
