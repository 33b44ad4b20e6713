// combine_recv: the results of a token, pulled from the ranks that made them and summed at home.
#include "kernels/reference/reference.hpp"
#include "kernels/reference/sum_rows.hpp"

namespace wherry::kernels::reference {

Moved combine_recv(const CombineRecv& a, std::int64_t begin, std::int64_t end) {
  Moved moved;
  SumRows wide(a.mode, a.mode.converts_home() ? a.plan.topk : 0);
  with_element(a.mode.dtype, [&]<DType kType>() {
    constexpr DType kSum = sum_dtype(kType);
    RowSum sum;
    for (std::int64_t token = begin; token < end; ++token) {
      find_token_rows(a, token, sum);
      count_moved(a, sum, moved);
      const std::byte* addend = a.addend != nullptr ? a.addend + token * a.addend_pitch : nullptr;
      std::byte* const out = a.out + token * a.out_pitch;
      if (a.mode.converts_home()) {
        wide.widen(sum, dequantize_row);
        sum_rows<kSum, kType>(sum, recv_rule(a.mode), addend, out, 0, a.mode.hidden);
      } else {
        sum_rows<kType>(sum, recv_rule(a.mode), addend, out, 0, a.mode.hidden);
      }
      if (a.scalars_out != nullptr) fetch_scalars(a, token);
    }
  });
  return moved;
}

}  // namespace wherry::kernels::reference
