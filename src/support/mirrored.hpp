// Memory of the host with its twin on a device, for callers that make and look at values on the host
// whichever device computes. On the CPU the two are one. Every build has this; one without CUDA knows the
// CPU only.
#pragma once

#include <cstddef>
#include <memory>

#include "wherry/types.hpp"

namespace wherry {

class MirroredMemory {
 public:
  // Zeroed. Throws out_of_memory, unsupported (no CUDA in this build).
  explicit MirroredMemory(Device device, std::size_t bytes = 0);
  MirroredMemory(MirroredMemory&&) noexcept;
  MirroredMemory& operator=(MirroredMemory&&) noexcept;
  ~MirroredMemory();

  [[nodiscard]] std::size_t bytes() const noexcept { return bytes_; }
  [[nodiscard]] std::byte* host() const noexcept { return host_.get(); }
  [[nodiscard]] std::byte* device() const noexcept;

  // Loses what it held, on both sides.
  void resize(std::size_t bytes);
  // The whole of it, after what the default stream of the device holds. Nothing to do on the CPU.
  void upload();
  void download();

 private:
  struct Twin;
  Device device_;
  std::size_t bytes_ = 0;
  std::unique_ptr<std::byte[]> host_;
  std::unique_ptr<Twin> twin_;  // null on the CPU
};

// Waits for what the default stream of the device holds. Nothing to do on the CPU. Throws system.
void synchronize(Device device);

}  // namespace wherry
