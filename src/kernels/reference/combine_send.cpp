// combine_send: with by_rank, what this rank has of a token is summed before it goes home.
#include "kernels/reference/reference.hpp"
#include "kernels/reference/sum_rows.hpp"

namespace wherry::kernels::reference {

void combine_send(const CombineSend& a, std::int64_t begin, std::int64_t end) {
  SumRows wide(a.mode, 1);
  with_element(a.mode.dtype, [&]<DType kType>() {
    constexpr DType kSum = sum_dtype(kType);
    RowSum sum;
    for (std::int64_t row = begin; row < end; ++row) {
      find_partial_rows(a, row, sum);
      std::byte* const partial = partial_row(a, row);
      if (a.mode.converts_home()) {
        sum_rows<kType, kSum>(sum, SumRule::weighted, nullptr, wide.row(0), 0, a.mode.hidden);
        quantize_row(wide.format(), wide.row(0), partial, partial_scale(a, row));
      } else {
        sum_rows<kType>(sum, SumRule::weighted, nullptr, partial, 0, a.mode.hidden);
      }
    }
  });
}

}  // namespace wherry::kernels::reference
