// combine_recv: the results of a token, pulled from the ranks that made them and summed at home.
#include "kernels/cpu/targets.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/combine_recv.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "kernels/cpu/cpu.hpp"
#include "kernels/cpu/sum-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace wherry::kernels::cpu {
namespace HWY_NAMESPACE {

// convert.cpp
void dequantize_row(const WireFormat& format, const std::byte* payload, const std::byte* scales,
                    std::byte* x);

// Rows that travelled in another format are widened a token at a time, then summed from the cache.
template <DType kType>
HWY_ATTR void combine_converted(const CombineRecv& a, std::int64_t begin, std::int64_t end,
                                Moved& moved) {
  SumRows wide(a.mode, a.plan.topk);
  RowSum sum;
  const RowSum none{};
  for (std::int64_t token = begin; token < end; ++token) {
    find_token_rows(a, token, sum);
    count_moved(a, sum, moved);
    wide.widen(sum, dequantize_row);
    const std::byte* addend = a.addend != nullptr ? a.addend + token * a.addend_pitch : nullptr;
    sum_row<sum_dtype(kType), kType>(sum, recv_rule(a.mode), addend, a.out + token * a.out_pitch,
                                     a.mode.hidden, a.streaming, none);
    if (a.scalars_out != nullptr) fetch_scalars(a, token);
  }
}

HWY_ATTR Moved combine_recv(const CombineRecv& a, std::int64_t begin, std::int64_t end) {
  Moved moved;
  with_element(a.mode.dtype, [&]<DType kType>() HWY_ATTR {
    if (a.mode.converts_home()) return combine_converted<kType>(a, begin, end, moved);
    RowSum sums[2];
    if (begin < end) find_token_rows(a, begin, sums[begin % 2]);
    for (std::int64_t token = begin; token < end; ++token) {
      RowSum& next = sums[(token + 1) % 2];
      next.count = 0;
      if (token + 1 < end) find_token_rows(a, token + 1, next);
      count_moved(a, sums[token % 2], moved);
      const std::byte* addend = a.addend != nullptr ? a.addend + token * a.addend_pitch : nullptr;
      sum_row<kType>(sums[token % 2], recv_rule(a.mode), addend, a.out + token * a.out_pitch,
                     a.mode.hidden, a.streaming, next);
      if (a.scalars_out != nullptr) fetch_scalars(a, token);
    }
  });
  if (a.streaming) hwy::FlushStream();
  return moved;
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace wherry::kernels::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace wherry::kernels::cpu {

HWY_EXPORT(combine_recv);

CombineRecvFn combine_recv_for(std::int64_t target) {
  return WHERRY_FOR_TARGET(combine_recv, target);
}

}  // namespace wherry::kernels::cpu
#endif
