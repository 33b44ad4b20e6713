#include "fabric/addressable.hpp"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>

#include "support/check.hpp"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE \
  23  // Linux 5.14; older kernels answer EINVAL and pages come on first use
#endif

namespace wherry {

namespace {

constexpr std::uint64_t kHugePage = std::uint64_t{2} << 20;

}  // namespace

std::byte* map_window(int fd, std::uint64_t bytes, bool populate) {
  const Error::Where where{Stage::startup, -1, -1};
  // Reserve more than needed, then map over the aligned part of the reservation.
  void* reserved = mmap(nullptr, bytes + kHugePage, PROT_NONE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  WHERRY_CHECK(reserved != MAP_FAILED, ErrorCode::out_of_memory, where,
               "no address space for a window of {} bytes: {}", bytes, std::strerror(errno));
  auto* const begin = static_cast<std::byte*>(reserved);
  const auto address = reinterpret_cast<std::uintptr_t>(begin);
  std::byte* const aligned = begin + (layout::round_up(address, kHugePage) - address);
  const int flags = fd >= 0 ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS;
  void* mapped = mmap(aligned, bytes, PROT_READ | PROT_WRITE, flags | MAP_FIXED, fd, 0);
  if (mapped == MAP_FAILED) {
    const int error = errno;
    munmap(reserved, bytes + kHugePage);
    throw Error(ErrorCode::out_of_memory, where,
                fmt::format("cannot map a window of {} bytes: {}", bytes, std::strerror(error)));
  }
  // Give back what the alignment did not use.
  if (aligned > begin) munmap(begin, static_cast<std::size_t>(aligned - begin));
  std::byte* const end = aligned + layout::round_up(bytes, layout::kRegionAlignment);
  std::byte* const reserved_end =
      begin + layout::round_up(bytes + kHugePage, layout::kRegionAlignment);
  if (reserved_end > end) munmap(end, static_cast<std::size_t>(reserved_end - end));
  madvise(aligned, bytes, MADV_HUGEPAGE);  // advice: measured 5 % faster copies; refused is fine
  if (populate && madvise(aligned, bytes, MADV_POPULATE_WRITE) != 0 && errno != EINVAL) {
    const int error = errno;
    unmap_window(aligned, bytes);
    throw Error(ErrorCode::out_of_memory, where,
                fmt::format("no memory for a window of {} bytes: {}", bytes, std::strerror(error)));
  }
  return aligned;
}

void unmap_window(std::byte* window, std::uint64_t bytes) noexcept {
  if (window != nullptr) munmap(window, bytes);
}

}  // namespace wherry
