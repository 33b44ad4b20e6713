// What a process holds, to see that nothing grows.
#pragma once

#include <fmt/format.h>
#include <malloc.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>

#include "support/layer.hpp"

namespace wherry::test {

#ifdef WHERRY_SANITIZED
inline constexpr bool kOwnAllocator =
    false;  // the sanitizer's, which keeps what is freed for a while
#else
inline constexpr bool kOwnAllocator = true;
#endif

struct Held {
  std::int64_t fds = 0;
  std::int64_t mappings = 0;
  std::int64_t allocated_kib = 0;  // and not freed
  std::int64_t resident_kib = 0;   // of its own, with what the allocator keeps; files do not count
};

inline Held held() {
  Held h;
  for ([[maybe_unused]] const auto& fd : std::filesystem::directory_iterator("/proc/self/fd")) {
    ++h.fds;
  }
  std::string line;
  for (std::ifstream maps("/proc/self/maps"); std::getline(maps, line);) ++h.mappings;
  for (std::ifstream status("/proc/self/status"); std::getline(status, line);) {
    if (line.starts_with("RssAnon:")) h.resident_kib = std::stoll(line.substr(8));
  }
  const struct mallinfo2 info = mallinfo2();
  h.allocated_kib = static_cast<std::int64_t>((info.uordblks + info.hblkhd) / 1024);
  return h;
}

// A leak in each of many rounds would not fit into what is spared here: what a thread's cache of small
// freed pieces can hold (glibc counts them as allocated), and some.
inline void expect_not_grown(const Held& before, const Held& after) {
  constexpr std::int64_t kSpareKib = 512;
  expect(after.fds == before.fds, fmt::format("fds: {} before, {} after", before.fds, after.fds));
  if (!kOwnAllocator) return;
  expect(after.mappings < before.mappings + 16,
         fmt::format("mappings: {} before, {} after", before.mappings, after.mappings));
  expect(after.allocated_kib < before.allocated_kib + kSpareKib,
         fmt::format("allocated: {} KiB before, {} KiB after", before.allocated_kib,
                     after.allocated_kib));
}

inline std::string growth(const Held& before, const Held& after) {
  return fmt::format(
      "fds {} -> {}, mappings {} -> {}, allocated {} -> {} KiB, resident {} -> {} KiB", before.fds,
      after.fds, before.mappings, after.mappings, before.allocated_kib, after.allocated_kib,
      before.resident_kib, after.resident_kib);
}

}  // namespace wherry::test
