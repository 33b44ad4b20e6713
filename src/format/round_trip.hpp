// What a row is worth after it has travelled: for references to compare with.
#pragma once

#include <cstdint>
#include <vector>

#include "wherry/format.hpp"

namespace wherry {

// Replaces a row [hidden] of format.dtype by what dequantize_row() makes of its converted form.
inline void round_trip_row(const WireFormat& format, void* row) {
  // Of 8 bytes each, for their alignment.
  std::vector<std::uint64_t> payload(static_cast<std::size_t>(format.payload_bytes / 8 + 1));
  std::vector<std::uint64_t> scales(static_cast<std::size_t>(format.scale_bytes / 8 + 1));
  quantize_row(format, row, payload.data(), scales.data());
  dequantize_row(format, payload.data(), scales.data(), row);
}

}  // namespace wherry
