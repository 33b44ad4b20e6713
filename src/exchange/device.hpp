// An exchange whose rows are in the memory of a device: what Exchange passes its calls on to. The host
// knows the generations and their phases, nothing of the counts.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "plan/device.hpp"
#include "wherry/exchange.hpp"

namespace wherry {

// Each as the function of Exchange with its name.
class DeviceExchange {
 public:
  DeviceExchange() = default;
  virtual ~DeviceExchange() = default;
  DeviceExchange(const DeviceExchange&) = delete;
  DeviceExchange& operator=(const DeviceExchange&) = delete;

  [[nodiscard]] virtual Device device() const noexcept = 0;
  [[nodiscard]] virtual const ExchangeConfig& config() const noexcept = 0;
  [[nodiscard]] virtual const Placement& placement() const noexcept = 0;
  [[nodiscard]] virtual int rank() const noexcept = 0;
  [[nodiscard]] virtual int size() const noexcept = 0;
  [[nodiscard]] virtual std::string_view kernels() const noexcept = 0;
  [[nodiscard]] virtual std::string_view fabric() const noexcept = 0;
  [[nodiscard]] virtual std::uint64_t window_bytes() const noexcept = 0;

  virtual void set_stream(void* stream) = 0;
  [[nodiscard]] virtual std::shared_ptr<DevicePlan> make_plan() = 0;
  virtual void plan(const Routing& routing, DevicePlan& plan) = 0;
  // The step that begins, for its dispatch_finish().
  [[nodiscard]] virtual std::uint64_t dispatch_begin(DevicePlan& plan, const ConstTensorView& x,
                                                     const DispatchOptions& options) = 0;
  [[nodiscard]] virtual Received dispatch_finish(std::uint64_t step) = 0;
  virtual Received dispatch(DevicePlan& plan, const ConstTensorView& x,
                            const DispatchOptions& options) = 0;
  virtual Received plan_dispatch(const Routing& routing, DevicePlan& plan, const ConstTensorView& x,
                                 const DispatchOptions& options) = 0;
  [[nodiscard]] virtual TensorView combine_input(DevicePlan& plan) = 0;
  [[nodiscard]] virtual std::uint64_t combine_begin(DevicePlan& plan, const ConstTensorView& y,
                                                    const TensorView& out,
                                                    const CombineOptions& options) = 0;
  virtual void combine_finish(std::uint64_t step) = 0;
  virtual void combine(DevicePlan& plan, const ConstTensorView& y, const TensorView& out,
                       const CombineOptions& options) = 0;
  virtual void release(const Received& received) = 0;
  virtual void check() = 0;
  [[nodiscard]] virtual std::span<const std::int64_t> loads() = 0;
  virtual void reset_loads() = 0;
  virtual void set_placement(const Placement& placement) = 0;
};

// Collective. Exchanges that take turns at one window; throws as the constructor of Exchange, unsupported
// in a build without CUDA.
[[nodiscard]] std::vector<std::unique_ptr<DeviceExchange>> make_device_exchanges(
    const Group& group, Device device, std::span<const ExchangeConfig> configs,
    std::span<std::byte> window);

}  // namespace wherry
