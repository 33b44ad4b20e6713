// The SIMD kernels, compiled once for each Highway target that fuses multiply-add. `target` is one
// of cpu_targets().
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/stages.hpp"

namespace wherry::kernels::cpu {

using DispatchSendFn = decltype(KernelSet::dispatch_send);
using CombineSendFn = decltype(KernelSet::combine_send);
using CombineRecvFn = decltype(KernelSet::combine_recv);
using QuantizeRowFn = decltype(KernelSet::quantize_row);
using DequantizeRowFn = decltype(KernelSet::dequantize_row);

[[nodiscard]] DispatchSendFn dispatch_send_for(std::int64_t target);
[[nodiscard]] CombineSendFn combine_send_for(std::int64_t target);
[[nodiscard]] CombineRecvFn combine_recv_for(std::int64_t target);
[[nodiscard]] QuantizeRowFn quantize_row_for(std::int64_t target);
[[nodiscard]] DequantizeRowFn dequantize_row_for(std::int64_t target);

// A set for each target that this build and this machine have, the best first.
[[nodiscard]] std::vector<KernelSet> sets();

}  // namespace wherry::kernels::cpu
