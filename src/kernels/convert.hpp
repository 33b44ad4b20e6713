// The conversion kernels: one row between the caller's dtype and a wire format. dispatch_send
// quantises with them, dispatch_recv and combine_recv dequantise. Chosen by name like the other
// kernels and equal bit by bit; see wherry/format.hpp for what they compute.
#pragma once

#include <cstddef>
#include <span>
#include <string_view>
#include <vector>

#include "wherry/format.hpp"

namespace wherry::kernels {

struct ConvertSet {
  std::string_view name;
  // scales as quantize_row() lays them out for one row alone.
  void (*quantize_row)(const WireFormat&, const std::byte* x, std::byte* payload,
                       std::byte* scales);
  void (*dequantize_row)(const WireFormat&, const std::byte* payload, const std::byte* scales,
                         std::byte* x);
};

// All sets this machine can run, the best first; `reference` is always the last.
[[nodiscard]] std::span<const ConvertSet> convert_sets();
// By the name of a kernel set; empty: the environment variable WHERRY_KERNELS, else the best.
// Throws unsupported, listing the names that exist.
[[nodiscard]] const ConvertSet& find_convert(std::string_view name);

namespace reference {
void quantize_row(const WireFormat& format, const std::byte* x, std::byte* payload,
                  std::byte* scales);
void dequantize_row(const WireFormat& format, const std::byte* payload, const std::byte* scales,
                    std::byte* x);
}  // namespace reference

namespace cpu {
// A set for each SIMD target that this build and this machine have, the best first.
[[nodiscard]] std::vector<ConvertSet> convert_sets();
}  // namespace cpu

}  // namespace wherry::kernels
