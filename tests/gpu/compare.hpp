// What a step on a GPU has brought beside what the same step on the CPU has: equal bit for bit, or
// std::runtime_error that says where not.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "gpu/twin.hpp"

namespace wherry::test {

struct At {
  const Case& test;
  int rank;
  int step;  // -1: of the whole run
};
[[noreturn]] void differ(const At& at, const std::string& what);

// Bits, so NaN and the sign of zero count.
template <typename T>
bool same_bits(const T& a, const T& b) {
  const auto* x = reinterpret_cast<const std::byte*>(&a);
  return std::equal(x, x + sizeof(T), reinterpret_cast<const std::byte*>(&b));
}

template <typename T>
void compare(const At& at, const char* what, const std::vector<T>& cpu, const std::vector<T>& gpu) {
  if (cpu.size() != gpu.size()) {
    differ(at, fmt::format("{} has {} entries on the CPU, {} on the GPU", what, cpu.size(),
                           gpu.size()));
  }
  for (std::size_t i = 0; i < cpu.size(); ++i) {
    if (same_bits(cpu[i], gpu[i])) continue;
    differ(at, fmt::format("{}[{}] is {} on the CPU, {} on the GPU", what, i, cpu[i], gpu[i]));
  }
}

// Slots, rows, counts and totals.
void compare_plans(const At& at, const PlanData& cpu, const PlanData& gpu);

struct HostRows {
  const std::byte* data;
  std::int64_t pitch;
};
struct RowRange {
  std::int64_t begin, end;
};
void compare_rows(const At& at, const char* what, HostRows cpu, HostRows gpu,
                  std::int64_t row_bytes, RowRange range);

// Rows, scales, scalars and lists; `here` of the CPU, `there` in device memory. `plan` is that of both.
void compare_received(const At& at, const PlanData& plan, const Received& here,
                      const Received& there);

}  // namespace wherry::test
