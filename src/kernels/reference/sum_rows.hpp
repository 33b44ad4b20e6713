// The sum of the numerics contract, one element at a time.
#pragma once

#include <cmath>

#include "kernels/reference/elements.hpp"
#include "kernels/result_rows.hpp"

namespace wherry::kernels::reference {

// out[h] = round(sum over rows, in order, of weight * row[h] (+ addend[h])), elements [begin, end).
// `weighted` false: plain additions, weights unused. addend may be null.
template <DType kType>
void sum_rows(const RowSum& sum, bool weighted, const std::byte* addend, std::byte* out,
              std::int64_t begin, std::int64_t end) {
  using E = Element<kType>;
  using Stored = typename E::Stored;
  using Sum = typename E::Sum;
  for (std::int64_t h = begin; h < end; ++h) {
    Sum acc = 0;
    for (int i = 0; i < sum.count; ++i) {
      const Sum value = E::load(reinterpret_cast<const Stored*>(sum.rows[i])[h]);
      acc = weighted ? std::fma(static_cast<Sum>(sum.weights[i]), value, acc) : acc + value;
    }
    if (addend != nullptr) acc += E::load(reinterpret_cast<const Stored*>(addend)[h]);
    reinterpret_cast<Stored*>(out)[h] = E::store(acc);
  }
}

}  // namespace wherry::kernels::reference
