#include "exchange/device.hpp"

#include "support/build_info.hpp"
#include "support/check.hpp"

#if WHERRY_HAS_CUDA
#include "exchange/cuda/exchange.hpp"
#endif

namespace wherry {

#if WHERRY_HAS_CUDA
std::unique_ptr<DeviceExchange> make_device_exchange(const Group& group, Device device,
                                                     const ExchangeConfig& config) {
  return std::make_unique<cuda::CudaExchange>(group, device, config);
}
#else
std::unique_ptr<DeviceExchange> make_device_exchange(const Group& group, Device /*device*/,
                                                     const ExchangeConfig& /*config*/) {
  throw Error(ErrorCode::unsupported, {Stage::startup, group.rank(), -1},
              fmt::format("this build has no CUDA: {}", build_info::reason_of("WHERRY_CUDA")));
}
#endif

}  // namespace wherry
