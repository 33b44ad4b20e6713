// Windows in the memory of GPUs that can address each other's. A peer's window is a pointer where it is
// in this process, and opened through CUDA IPC where it is in another process of this host. Kernels write
// rows and signals into windows themselves, so this fabric carries no signals.
//
// Memory lives until all have let go of it: ranks of one process share its ownership; the others tell
// each other through a page of host memory, a `process` or `shm` fabric, that they have closed it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "fabric/fabric.hpp"
#include "support/cuda.hpp"
#include "wherry/types.hpp"

namespace wherry {

// Where a rank is. Equal `host` and `process`: threads of one process; equal `gpu`: the same device.
struct CudaPlace {
  std::string host;
  std::int64_t process = 0;
  std::string gpu;  // its UUID
  int ordinal = 0;
};
// Collective. The place of every rank. Throws bad_argument for a device that does not exist, unsupported
// for ranks on several hosts.
[[nodiscard]] std::vector<CudaPlace> find_places(const Group& group, Device device);

class CudaPeerFabric {
 public:
  // Collective. Throws unsupported where two GPUs cannot address each other, out_of_memory (on all
  // ranks), timeout, peer_failed, system.
  CudaPeerFabric(const Group& group, const std::vector<CudaPlace>& places,
                 const WindowRequest& request);
  // Waits, up to the deadline, for the peers of other processes to close this rank's window.
  ~CudaPeerFabric();
  CudaPeerFabric(const CudaPeerFabric&) = delete;
  CudaPeerFabric& operator=(const CudaPeerFabric&) = delete;

  [[nodiscard]] std::string_view name() const noexcept { return "cuda_peer"; }
  // This rank's address of a peer's window. Zeroed at construction.
  [[nodiscard]] std::byte* window(int peer) const noexcept {
    return windows_[static_cast<std::size_t>(peer)];
  }
  [[nodiscard]] bool alive(int peer) { return host_->alive(peer); }

 private:
  void close() noexcept;

  int rank_;
  Seconds deadline_;
  std::unique_ptr<Fabric> host_;  // signs of life, and who has closed what
  std::shared_ptr<cuda::DeviceMemory> own_;
  std::vector<std::shared_ptr<cuda::DeviceMemory>> beside_;  // [ranks] of this process, else null
  std::vector<bool> opened_;                                 // [ranks] through CUDA IPC
  std::vector<std::byte*> windows_;                          // [ranks]
};

}  // namespace wherry
