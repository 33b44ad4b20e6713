// An exchange on a GPU: drives the kernels of src/kernels/cuda. The host keeps the order of the halves and
// the phases of the generations, as on the CPU (exchange/state.hpp); epochs and counts stay on the device.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "exchange/config.hpp"
#include "exchange/cuda/launches.hpp"
#include "exchange/cuda/plan.hpp"
#include "exchange/device.hpp"
#include "exchange/window.hpp"
#include "fabric/cuda_peer/fabric.hpp"
#include "kernels/cuda/launch.hpp"
#include "kernels/stages.hpp"

namespace wherry::cuda {

class CudaExchange;

// The windows of all ranks, and whose rows are in them. Exchanges that share it take turns.
struct MappedWindows {
  std::unique_ptr<CudaPeerFabric> fabric;
  bool shared = false;
  const CudaExchange* user = nullptr;  // whose turn it is; null: nobody's
  bool used = false;                   // somebody has had a turn
  bool captured = false;           // in a graph: whose turn it is when it runs, nobody here knows
  unsigned long long capture = 0;  // the last such graph
};

// Collective. One exchange for each configuration, all of them at one window. See
// make_sharing_exchanges().
[[nodiscard]] std::vector<std::unique_ptr<DeviceExchange>> make_exchanges(
    const Group& group, Device device, std::span<const ExchangeConfig> configs,
    std::span<std::byte> window);

class CudaExchange final : public DeviceExchange {
 public:
  // Collective. Checks the configuration and this machine; to be used after attach().
  CudaExchange(const Group& group, Device device, const std::vector<CudaPlace>& places,
               const ExchangeConfig& config);
  ~CudaExchange() override;

  [[nodiscard]] const layout::WindowParams& window_params() const noexcept {
    return owner_->capacity.params;
  }
  // Collective. Its place at the windows.
  void attach(const Group& group, std::shared_ptr<MappedWindows> windows,
              const SharedLayout::Place& place);

  [[nodiscard]] Device device() const noexcept override { return device_; }
  [[nodiscard]] const ExchangeConfig& config() const noexcept override { return owner_->config; }
  [[nodiscard]] const Placement& placement() const noexcept override { return placement_; }
  [[nodiscard]] int rank() const noexcept override { return owner_->rank; }
  [[nodiscard]] int size() const noexcept override { return placement_.num_ranks(); }
  [[nodiscard]] std::string_view kernels() const noexcept override {
    if (!bulk_) return "cuda_copy";
    return one_gpu_ && over_link_ ? "cuda_link" : "cuda";
  }
  [[nodiscard]] std::string_view fabric() const noexcept override {
    return windows_->fabric->name();
  }
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
  // lost: another exchange had its turn at the window.
  enum class Phase : std::uint8_t {
    unused,
    sending,
    received,
    combining,
    combined,
    released,
    lost,
  };
  struct Generation {
    Phase phase = Phase::unused;
    std::uint64_t step = 0;
    std::uint64_t plan_serial = 0;
    kernels::cuda::PlanArrays plan{};
    TensorView out;  // of dispatch: the caller's memory, or null
    const std::byte* x_scales = nullptr;
    TensorView sums;  // of combine
    ConstTensorView addend;
    float* scalars_out = nullptr;
    kernels::cuda::TokenChoice* choices = nullptr;  // tokens: [token rows, topk]
    std::int32_t* gather = nullptr;                 // tokens
  };

  void agree_on_path(const Group& group, const ExchangeConfig& config) const;
  void take_memory(std::uint64_t begin);
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
  // `rows` rows as they travel to the experts.
  [[nodiscard]] TensorView on_wire(std::int64_t rows) const noexcept;

  [[nodiscard]] std::uint32_t generation_of(std::uint64_t step) const noexcept {
    return static_cast<std::uint32_t>((step - 1) % generations_.size());
  }
  [[nodiscard]] Generation& at_step(std::uint64_t step) noexcept {
    return generations_[generation_of(step)];
  }
  // A handover, if another exchange of the window had the last turn, or may have it in a graph.
  void take_window();
  [[nodiscard]] bool in_flight() const noexcept;
  Generation& enter();
  [[nodiscard]] Generation* oldest_uncombined(std::uint64_t plan_serial) noexcept;
  void tell(const kernels::cuda::TellArgs& args, Stage stage);
  // Rows that there is room for.
  [[nodiscard]] std::int64_t room() const noexcept;
  [[nodiscard]] bool fills_on_arrival() const noexcept;
  [[nodiscard]] bool expects_recv() const noexcept;
  // The blocks that send rows also fill, when the peers' have come, the slots that got none.
  [[nodiscard]] bool fills_with_rows() const noexcept;
  // The blocks that send token rows also list those that have come.
  [[nodiscard]] bool lists_with_rows(const ConstTensorView& x) const noexcept;

  [[nodiscard]] kernels::cuda::CountArgs count_args(const Routing& routing,
                                                    const CudaPlan& plan) const;
  void check_dispatch(const CudaPlan* plan, std::int64_t tokens, const ConstTensorView& x,
                      const DispatchOptions& options);
  // x has the format in which it travels.
  [[nodiscard]] bool is_converted(const ConstTensorView& x,
                                  const DispatchOptions& options) const noexcept;
  void check_x_scales(std::int64_t tokens, const void* x_scales);
  Generation& begin_dispatch(const CudaPlan& plan, const DispatchOptions& options);
  [[nodiscard]] kernels::cuda::Outgoing outgoing(const Generation& g, const ConstTensorView& x,
                                                 bool receive) const;
  [[nodiscard]] kernels::cuda::ScalarsArgs scalars_of(const Generation& g, const float* from,
                                                      float* to) const;
  [[nodiscard]] kernels::cuda::Lists lists_of(const Generation& g) const;
  void send_rows(const Generation& g, const ConstTensorView& x, bool receive);
  [[nodiscard]] cudaError_t send_converted(
      const kernels::cuda::RankTable<kernels::cuda::DispatchSendArgs>& table, int ranks,
      cudaStream_t stream) const;
  // Where rows are converted: by the kernels for bf16 as e4m3_block128 alone.
  [[nodiscard]] bool converts_fast() const noexcept;
  void receive_rows(const Generation& g);
  Received end_dispatch(Generation& g);
  void fill_out(const Generation& g, Received& r);
  [[nodiscard]] bool fuses(const ConstTensorView& x) const noexcept;
  [[nodiscard]] kernels::cuda::PlanDispatchShape plan_dispatch_shape(
      std::int64_t tokens) const noexcept;
  Generation& begin_combine(DevicePlan& plan, const ConstTensorView& y, const TensorView& out,
                            const CombineOptions& options);
  void place_results(const Generation& g, const ConstTensorView& y);
  // Sums are of rows that combine_*_converted.cu take.
  [[nodiscard]] bool sums_converted() const noexcept {
    return mode_.converts_home() || mode_.dtype == DType::f64;
  }
  // By kernels that take both halves in one launch; what is converted takes two.
  [[nodiscard]] bool pushes_partials() const noexcept {
    return mode_.sums_partials() && !sums_converted();
  }
  [[nodiscard]] kernels::cuda::CombineRecvArgs recv_args(const Generation& g, bool send,
                                                         bool receive) const;
  void send_results(const Generation& g);
  void run_partials(const kernels::cuda::CombineRecvArgs& args, Stage stage);
  void pull_results(const kernels::cuda::CombineRecvArgs& args);
  void sum_results(Generation& g, bool send);

  Device device_;
  std::shared_ptr<PlanOwner> owner_;
  Placement placement_;
  kernels::Mode mode_;
  bool bulk_ = false;    // rows may go by bulk copies
  bool one_gpu_ = true;  // all ranks are on this one
  bool over_link_ =
      false;  // ranks are on several GPUs, or do as if: what travels, and how launches are shaped
  bool overlaps_ = false;  // a launch may begin before the one before it has ended
  int num_sms_ = 0;
  int shared_bytes_ = 0;
  std::uint64_t cache_bytes_ = 0;  // this rank's part of the second-level cache
  double everywhere_ = 1;          // ranks that a token goes to, on average
  std::shared_ptr<MappedWindows> windows_;
  std::vector<int> together_;  // ranks that launch together
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
