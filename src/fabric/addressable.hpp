// What `process` and `shm` share: windows this rank can address.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "kernels/layout.hpp"
#include "support/doorbell.hpp"

namespace wherry {

// The doorbell of the SignalWord at `offset`.
[[nodiscard]] inline Doorbell window_doorbell(std::byte* window, std::uint64_t offset) noexcept {
  auto& word = *reinterpret_cast<layout::SignalWord*>(window + offset);
  return {word.bell, word.sleepers};
}
[[nodiscard]] inline std::atomic_ref<std::uint64_t> window_word(std::byte* window,
                                                                std::uint64_t offset) noexcept {
  return std::atomic_ref(*reinterpret_cast<std::uint64_t*>(window + offset));
}

// Strong on memory the CPU can address: a release store makes this thread's earlier writes visible
// with the value. Kernels that used streaming stores have fenced them before they returned.
inline void signal_addressable(std::byte* window, std::uint64_t offset,
                               std::uint64_t value) noexcept {
  window_word(window, offset).store(value, std::memory_order_release);
  window_doorbell(window, offset).ring();
}

// Maps `bytes` aligned to 2 MiB, so that huge pages can back it. fd -1: private to this process.
// Touches every page if asked, so that a lack of memory is an error here and not a signal later.
// Throws out_of_memory.
[[nodiscard]] std::byte* map_window(int fd, std::uint64_t bytes, bool populate);
void unmap_window(std::byte* window, std::uint64_t bytes) noexcept;

}  // namespace wherry
