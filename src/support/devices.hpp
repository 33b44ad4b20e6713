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
  std::string
      no_virtual_memory;  // why windows are not shared as virtual memory by file descriptors; empty: they are
};
struct Devices {
  std::vector<DeviceDescription> found;  // in the order of Device::ordinal
  std::string problem;                   // why there are none
};
// Starts CUDA: not in a process that will fork ranks.
[[nodiscard]] Devices find_devices();
// Why a GPU that find_devices() has found does not share windows by fabric handles; empty: it can. Makes one.
[[nodiscard]] std::string no_fabric_handles(int ordinal);

}  // namespace wherry
