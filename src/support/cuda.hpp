// What host code needs of the CUDA runtime: errors as exceptions, memory with an owner, and the current
// device of a thread. Builds with CUDA only.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <span>

#include "wherry/error.hpp"

namespace wherry::cuda {

// Throws what CUDA says of `what`: out_of_memory where memory is missing, else system.
void check(cudaError_t error, Error::Where where, const char* what);

// Records `events` (null: none) when all that is in the stream now is done. In a stream that is being
// captured, by every replay, and beside the stream: between two kernels an event takes a microsecond.
[[nodiscard]] cudaError_t record_beside(cudaStream_t stream, std::span<const cudaEvent_t> events);

// The calling thread's device is `ordinal` until the end of the scope.
class DeviceGuard {
 public:
  explicit DeviceGuard(int ordinal);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

// Memory of a device, zeroed. Freed on that device, whichever is current.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  DeviceMemory(int ordinal, std::size_t bytes);
  ~DeviceMemory();
  DeviceMemory(DeviceMemory&& other) noexcept { *this = static_cast<DeviceMemory&&>(other); }
  DeviceMemory& operator=(DeviceMemory&& other) noexcept;

  [[nodiscard]] std::byte* get() const noexcept { return data_; }
  [[nodiscard]] std::size_t bytes() const noexcept { return bytes_; }
  [[nodiscard]] int ordinal() const noexcept { return ordinal_; }

 private:
  int ordinal_ = 0;
  std::size_t bytes_ = 0;
  std::byte* data_ = nullptr;
};

// Memory of the host that devices can write, zeroed.
class PinnedMemory {
 public:
  explicit PinnedMemory(std::size_t bytes);
  ~PinnedMemory();
  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;

  [[nodiscard]] std::byte* get() const noexcept { return data_; }

 private:
  std::byte* data_ = nullptr;
};

// A stream of its own, that waits for no other.
class SideStream {
 public:
  explicit SideStream(int ordinal);
  ~SideStream();
  SideStream(const SideStream&) = delete;
  SideStream& operator=(const SideStream&) = delete;

  // Copies to the host and waits for it.
  void read(void* to, const void* from, std::size_t bytes) const;
  // Copies to the device, or zeroes there (from == nullptr), and waits for it.
  void write(void* to, const void* from, std::size_t bytes) const;

 private:
  int ordinal_;
  cudaStream_t stream_ = nullptr;
};

}  // namespace wherry::cuda
