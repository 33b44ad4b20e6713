#include "exchange/device.hpp"

#include "support/build_info.hpp"
#include "support/check.hpp"

#if WHERRY_HAS_CUDA
#include "exchange/cuda/exchange.hpp"
#endif

namespace wherry {

#if WHERRY_HAS_CUDA
std::vector<std::unique_ptr<DeviceExchange>> make_device_exchanges(
    const Group& group, Device device, std::span<const ExchangeConfig> configs,
    std::span<std::byte> window) {
  return cuda::make_exchanges(group, device, configs, window);
}
#else
std::vector<std::unique_ptr<DeviceExchange>> make_device_exchanges(
    const Group& group, Device /*device*/, std::span<const ExchangeConfig> /*configs*/,
    std::span<std::byte> /*window*/) {
  throw Error(ErrorCode::unsupported, {Stage::startup, group.rank(), -1},
              fmt::format("this build has no CUDA: {}", build_info::reason_of("WHERRY_CUDA")));
}
#endif

}  // namespace wherry
