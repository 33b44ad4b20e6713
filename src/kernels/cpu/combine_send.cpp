// combine_send: with by_rank, what this rank has of a token is summed before it goes home.
#include "kernels/cpu/targets.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/combine_send.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "kernels/cpu/cpu.hpp"
#include "kernels/cpu/sum-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace wherry::kernels::cpu {
namespace HWY_NAMESPACE {

// convert.cpp
void quantize_row(const WireFormat& format, const std::byte* x, std::byte* payload,
                  std::byte* scales);

HWY_ATTR void combine_send(const CombineSend& a, std::int64_t begin, std::int64_t end) {
  SumRows wide(a.mode, 1);
  with_element(a.mode.dtype, [&]<DType kType>() HWY_ATTR {
    RowSum sums[2];
    if (begin < end) find_partial_rows(a, begin, sums[begin % 2]);
    for (std::int64_t row = begin; row < end; ++row) {
      RowSum& next = sums[(row + 1) % 2];
      next.count = 0;
      if (row + 1 < end) find_partial_rows(a, row + 1, next);
      std::byte* const partial = partial_row(a, row);
      if (a.mode.converts_home()) {  // what is quantised is the sum, not the sum rounded to kType
        sum_row<kType, sum_dtype(kType)>(sums[row % 2], SumRule::weighted, nullptr, wide.row(0),
                                         a.mode.hidden, false, next);
        quantize_row(wide.format(), wide.row(0), partial, partial_scale(a, row));
      } else {
        sum_row<kType>(sums[row % 2], SumRule::weighted, nullptr, partial, a.mode.hidden,
                       a.streaming, next);
      }
    }
  });
  if (a.streaming) hwy::FlushStream();
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace wherry::kernels::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace wherry::kernels::cpu {

HWY_EXPORT(combine_send);

CombineSendFn combine_send_for(std::int64_t target) {
  return WHERRY_FOR_TARGET(combine_send, target);
}

}  // namespace wherry::kernels::cpu
#endif
