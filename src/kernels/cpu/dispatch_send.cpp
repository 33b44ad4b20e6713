// dispatch_send with streaming stores: a row that goes to a peer is not read here again, so it would
// only push others out of the caches. Measured: ordinary stores double the time of the send.
#include "kernels/cpu/targets.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/dispatch_send.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "kernels/cpu/copy-inl.hpp"
#include "kernels/cpu/cpu.hpp"
#include "kernels/send_rows.hpp"

HWY_BEFORE_NAMESPACE();
namespace wherry::kernels::cpu {
namespace HWY_NAMESPACE {

// convert.cpp
void quantize_row(const WireFormat& format, const std::byte* x, std::byte* payload,
                  std::byte* scales);

HWY_ATTR Moved dispatch_send(const DispatchSend& a, std::int64_t begin, std::int64_t end) {
  if (!a.streaming) {
    const auto copy_row = [](std::byte* to, const std::byte* from, std::int64_t bytes) {
      std::memcpy(to, from, static_cast<std::size_t>(bytes));
    };
    return send_rows(a, begin, end, quantize_row, copy_row);
  }
  const Moved moved = send_rows(a, begin, end, quantize_row, stream_row);
  hwy::FlushStream();
  return moved;
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace wherry::kernels::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace wherry::kernels::cpu {

HWY_EXPORT(dispatch_send);

DispatchSendFn dispatch_send_for(std::int64_t target) {
  return WHERRY_FOR_TARGET(dispatch_send, target);
}

}  // namespace wherry::kernels::cpu
#endif
