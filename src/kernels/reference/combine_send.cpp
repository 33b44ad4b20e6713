// combine_send: with by_rank, what this rank has of a token is summed before it goes home.
#include "kernels/reference/reference.hpp"
#include "kernels/reference/sum_rows.hpp"

namespace wherry::kernels::reference {

void combine_send(const CombineSend& a, std::int64_t begin, std::int64_t end) {
  with_element(a.mode.dtype, [&]<DType kType>() {
    RowSum sum;
    for (std::int64_t row = begin; row < end; ++row) {
      find_partial_rows(a, row, sum);
      sum_rows<kType>(sum, SumRule::weighted, nullptr, partial_row(a, row), 0, a.mode.hidden);
    }
  });
}

}  // namespace wherry::kernels::reference
