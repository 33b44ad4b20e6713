// The memory of a window on a GPU, and how the peers get at it.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "support/cuda.hpp"
#include "support/fd.hpp"
#include "wherry/error.hpp"

namespace wherry::cuda {

// Either the window of this rank, which it owns, or a peer's in another process, which it has mapped.
class WindowMemory {
 public:
  virtual ~WindowMemory() = default;
  WindowMemory(const WindowMemory&) = delete;
  WindowMemory& operator=(const WindowMemory&) = delete;

  [[nodiscard]] std::byte* get() const noexcept { return address_; }
  // Lets another GPU of this process address it too. Throws unsupported where it cannot.
  virtual void allow(int ordinal, Error::Where where) = 0;

 protected:
  WindowMemory() = default;
  std::byte* address_ = nullptr;
};

// Of cudaMalloc, zeroed: shared by pointer within a process, by CUDA IPC between processes.
class AllocatedMemory final : public WindowMemory {
 public:
  AllocatedMemory(int ordinal, std::uint64_t bytes);
  // The caller's memory, which must outlive this.
  AllocatedMemory(int ordinal, std::span<std::byte> given);
  void allow(int ordinal, Error::Where where) override;

  // What another process opens: an allocation, and how far inside it the window lies.
  struct Handle {
    cudaIpcMemHandle_t allocation;
    std::uint64_t offset;
  };
  [[nodiscard]] Handle handle(Error::Where where) const;

 private:
  int ordinal_;
  DeviceMemory memory_;  // empty: the caller's
};
class OpenedMemory final : public WindowMemory {
 public:
  OpenedMemory(const AllocatedMemory::Handle& handle, Error::Where where);
  ~OpenedMemory() override;
  void allow(int ordinal, Error::Where where) override;

 private:
  std::uint64_t offset_;
};

// CUDA virtual memory: physical memory apart from the addresses that it is mapped to, so it can be shared
// through what stands for it: a file descriptor, or a fabric handle, which is plain bytes. It lives until
// all have unmapped it, whoever made it.
class VirtualMemory final : public WindowMemory {
 public:
  enum class Sharing : std::uint8_t { file_descriptor, fabric_handle };
  using FabricHandle = std::array<std::byte, 64>;

  // Why the GPU cannot share its memory so; empty: it can.
  [[nodiscard]] static std::string problem(int ordinal, Sharing how);

  // Makes it, zeroed. Throws out_of_memory, system.
  VirtualMemory(int ordinal, std::uint64_t bytes, Sharing how);
  // Maps a peer's of as many bytes for this rank's GPU `ordinal`.
  VirtualMemory(int ordinal, std::uint64_t bytes, const Fd& shared);
  VirtualMemory(int ordinal, std::uint64_t bytes, const FabricHandle& shared);
  ~VirtualMemory() override;

  void allow(int ordinal, Error::Where where) override;
  // Of memory that was made to be shared so.
  [[nodiscard]] Fd file_descriptor() const;
  [[nodiscard]] FabricHandle fabric_handle() const;

 private:
  void import(int ordinal, void* shared, Sharing how);
  void map(int ordinal);
  void unmap() noexcept;

  std::uint64_t bytes_;
  std::uint64_t handle_ = 0;
  std::uint64_t reserved_ = 0;  // address, until it is in address_ as well
  bool mapped_ = false;
};

}  // namespace wherry::cuda
