// Windows in the memory of GPUs that can address each other's. A peer's window is a pointer where it is
// in this process; between processes of this host it is CUDA virtual memory, shared through a file
// descriptor or a fabric handle, or where a GPU has neither, memory opened through CUDA IPC; in this order,
// unless WHERRY_CUDA_WINDOWS=virtual_memory, fabric_handles or ipc says which. Memory that the caller gives
// for its window is shared through CUDA IPC. Kernels write rows and signals into windows themselves, so this
// fabric carries no signals.
//
// Memory lives until all have let go of it: ranks of one process share its ownership, virtual memory is
// counted by the driver, and with CUDA IPC ranks tell each other through a page of host memory, a
// `process` or `shm` fabric, that they have closed it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "fabric/cuda_peer/memory.hpp"
#include "fabric/fabric.hpp"
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
  // Collective. request.memory must outlive it. Throws unsupported where two GPUs cannot address each other or lack the kind of window
  // that was asked for, config_mismatch, out_of_memory (on all ranks), timeout, peer_failed, system.
  CudaPeerFabric(const Group& group, const std::vector<CudaPlace>& places,
                 const WindowRequest& request);
  // With CUDA IPC waits, up to the deadline, for the peers of other processes to close this rank's window.
  ~CudaPeerFabric();
  CudaPeerFabric(const CudaPeerFabric&) = delete;
  CudaPeerFabric& operator=(const CudaPeerFabric&) = delete;

  // With the kind of window: "cuda_peer, virtual memory".
  [[nodiscard]] std::string_view name() const noexcept;
  // This rank's address of a peer's window. Zeroed at construction.
  [[nodiscard]] std::byte* window(int peer) const noexcept {
    return windows_[static_cast<std::size_t>(peer)]->get();
  }
  [[nodiscard]] bool alive(int peer) { return host_->alive(peer); }

 private:
  enum class Windows : std::uint8_t { pointers, virtual_memory, fabric_handles, ipc };

  // Collective, each: the kind of window that all ranks can have; the windows, of that kind.
  [[nodiscard]] Windows choose(const Group& group, const std::vector<CudaPlace>& places,
                               const WindowRequest& request) const;
  void make(const Group& group, const std::vector<CudaPlace>& places, const WindowRequest& request);
  void close() noexcept;

  int rank_;
  Seconds deadline_;
  std::unique_ptr<Fabric> host_;  // signs of life, and who has closed what
  Windows kind_ = Windows::pointers;
  std::vector<std::shared_ptr<cuda::WindowMemory>> windows_;  // [ranks]
};

}  // namespace wherry
