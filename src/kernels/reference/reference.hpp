// The scalar kernels: one plain loop a stage, the definition the other sets must equal bit by bit.
#pragma once

#include "kernels/stages.hpp"

namespace wherry::kernels::reference {

Moved dispatch_send(const DispatchSend& args, std::int64_t begin, std::int64_t end);
void dispatch_recv(const DispatchRecv& args);
void combine_send(const CombineSend& args, std::int64_t begin, std::int64_t end);
Moved combine_recv(const CombineRecv& args, std::int64_t begin, std::int64_t end);
void quantize_row(const WireFormat& format, const std::byte* x, std::byte* payload,
                  std::byte* scales);
void dequantize_row(const WireFormat& format, const std::byte* payload, const std::byte* scales,
                    std::byte* x);

}  // namespace wherry::kernels::reference
