// Plain copies at the speed of memory: what the floor of the benchmarks is made of.
#pragma once

#include <cstddef>
#include <cstdint>

namespace wherry::bench {

enum class Stores : std::uint8_t {
  streaming,  // past the caches: best where the data does not fit in them
  ordinary,   // memcpy: best where it does
};

// `bytes` is a multiple of 64 and both addresses are; other memory is not changed.
void copy_row(std::byte* to, const std::byte* from, std::size_t bytes, Stores stores);
// Orders streaming stores before what follows.
void finish_copies();
// Reads every byte; the result depends on all of them, so that no compiler leaves it out.
[[nodiscard]] std::uint64_t read_row(const std::byte* from, std::size_t bytes);

}  // namespace wherry::bench
