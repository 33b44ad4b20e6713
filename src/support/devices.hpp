// The GPUs that this process could use. Every build has this; one without CUDA finds none and says why.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace wherry {

struct DeviceDescription {
  std::string name;
  int multiprocessors = 0;
  int compute_major = 0;
  int compute_minor = 0;
  std::uint64_t memory_bytes = 0;
  bool bulk_copies = false;  // rows go by them; otherwise by ordinary copies
  // Why windows are not shared as virtual memory, by file descriptors or fabric handles; empty: they can be.
  std::string no_virtual_memory;
  std::string no_fabric_handles;
};
struct Devices {
  std::vector<DeviceDescription> found;  // in the order of Device::ordinal
  std::string problem;                   // why there are none
};
// Starts CUDA: not in a process that will fork ranks.
[[nodiscard]] Devices find_devices();

}  // namespace wherry
