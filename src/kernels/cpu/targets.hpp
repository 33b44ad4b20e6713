// To be included before hwy/highway.h by every SIMD kernel file: which targets are compiled.
#pragma once

#include <hwy/detect_targets.h>

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
