// Copies a row around the caches. Included once per target.
#include <cstdint>
#include <cstring>

#include "hwy/cache_control.h"
#include "hwy/highway.h"

#if defined(WHERRY_CPU_COPY_INL) == defined(HWY_TARGET_TOGGLE)
#ifdef WHERRY_CPU_COPY_INL
#undef WHERRY_CPU_COPY_INL
#else
#define WHERRY_CPU_COPY_INL
#endif

HWY_BEFORE_NAMESPACE();
namespace wherry::kernels::cpu {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// Streaming stores need aligned vectors: the head up to the first one and the tail go by memcpy.
// The caller fences.
inline HWY_ATTR void stream_row(std::byte* to, const std::byte* from, std::int64_t bytes) {
  const hn::ScalableTag<std::uint8_t> d;
  const std::size_t lanes = hn::Lanes(d);
  const auto size = static_cast<std::size_t>(bytes);
  std::size_t at = (lanes - reinterpret_cast<std::uintptr_t>(to) % lanes) % lanes;
  if (at >= size) {
    std::memcpy(to, from, size);
    return;
  }
  std::memcpy(to, from, at);
  auto* out = reinterpret_cast<std::uint8_t*>(to);
  const auto* in = reinterpret_cast<const std::uint8_t*>(from);
  for (; at + 4 * lanes <= size; at += 4 * lanes) {
    const auto v0 = hn::LoadU(d, in + at);
    const auto v1 = hn::LoadU(d, in + at + lanes);
    const auto v2 = hn::LoadU(d, in + at + 2 * lanes);
    const auto v3 = hn::LoadU(d, in + at + 3 * lanes);
    hn::Stream(v0, d, out + at);
    hn::Stream(v1, d, out + at + lanes);
    hn::Stream(v2, d, out + at + 2 * lanes);
    hn::Stream(v3, d, out + at + 3 * lanes);
  }
  std::memcpy(to + at, from + at, size - at);
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace wherry::kernels::cpu
HWY_AFTER_NAMESPACE();

#endif
