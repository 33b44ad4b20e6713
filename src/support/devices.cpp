#include "support/devices.hpp"

#include "support/build_info.hpp"

#if WHERRY_HAS_CUDA
#include "fabric/cuda_peer/memory.hpp"
#include "kernels/cuda/launch.hpp"
#endif

namespace wherry {

#if WHERRY_HAS_CUDA
Devices find_devices() {
  Devices devices;
  int count = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&count); error != cudaSuccess) {
    int driver = 0;
    const bool none = cudaDriverGetVersion(&driver) == cudaSuccess && driver == 0;
    devices.problem = none ? "there is no NVIDIA driver" : cudaGetErrorString(error);
    static_cast<void>(cudaGetLastError());
    return devices;
  }
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    cudaDeviceProp properties{};
    DeviceDescription& device = devices.found.emplace_back();
    if (cudaGetDeviceProperties(&properties, ordinal) != cudaSuccess) continue;
    device.name = properties.name;
    device.multiprocessors = properties.multiProcessorCount;
    device.compute_major = properties.major;
    device.compute_minor = properties.minor;
    device.memory_bytes = properties.totalGlobalMem;
    static_cast<void>(kernels::cuda::has_bulk_copies(ordinal, device.bulk_copies));
    device.no_virtual_memory =
        cuda::VirtualMemory::problem(ordinal, cuda::VirtualMemory::Sharing::file_descriptor);
  }
  return devices;
}
std::string no_fabric_handles(int ordinal) {
  return cuda::VirtualMemory::problem(ordinal, cuda::VirtualMemory::Sharing::fabric_handle);
}
#else
Devices find_devices() {
  Devices devices;
  devices.problem = build_info::reason_of("WHERRY_CUDA");
  return devices;
}
std::string no_fabric_handles(int /*ordinal*/) {
  return std::string(build_info::reason_of("WHERRY_CUDA"));
}
#endif

}  // namespace wherry
