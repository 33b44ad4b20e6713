// To be included before hwy/highway.h by every SIMD kernel file: which targets are compiled.
#pragma once

#include <hwy/detect_targets.h>

#include <cstdint>
#include <string_view>

// SSSE3 and SSE4 do not fuse multiply and add, so their sums would differ in the last bit.
#undef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4)

// The function of one target from the table that HWY_EXPORT made, whatever the machine's best is.
#define WHERRY_FOR_TARGET(function, target)                 \
  ([](std::int64_t wanted) {                                \
    hwy::ChosenTarget chosen;                               \
    chosen.Update(wanted);                                  \
    return HWY_DISPATCH_TABLE(function)[chosen.GetIndex()]; \
  }(target))

namespace wherry::kernels::cpu {

// The best first. Names are ours: a user pins one with WHERRY_KERNELS.
struct Target {
  std::int64_t bits;
  std::string_view name;
};
inline constexpr Target kTargets[] = {{HWY_AVX3, "avx512"}, {HWY_AVX2, "avx2"}, {HWY_NEON, "neon"}};

}  // namespace wherry::kernels::cpu
