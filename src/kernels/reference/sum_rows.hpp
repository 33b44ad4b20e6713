// The sum of the numerics contract, one element at a time.
#pragma once

#include <cmath>
#include <type_traits>

#include "kernels/reference/elements.hpp"
#include "kernels/result_rows.hpp"

namespace wherry::kernels::reference {

template <DType kType>
[[nodiscard]] typename Element<kType>::Sum sum_element(const RowSum& sum, SumRule rule,
                                                       std::int64_t h) {
  using E = Element<kType>;
  using Sum = typename E::Sum;
  const auto value = [&](int i) {
    return E::load(reinterpret_cast<const typename E::Stored*>(sum.rows[i])[h]);
  };
  Sum acc = 0;
  if (rule == SumRule::plain) {
    for (int i = 0; i < sum.count; ++i) acc = acc + value(i);
    return acc;
  }
  Sum total = 0;
  for (int i = 0; i < sum.count; ++i) {
    acc = std::fma(static_cast<Sum>(sum.weights[i]), value(i), acc);
    if (rule == SumRule::per_rank && sum.ends_rank[i]) {
      total = total + E::load(E::store(acc));
      acc = 0;
    }
  }
  return rule == SumRule::per_rank ? total : acc;
}

// out[h] = round(sum of the rows by `rule` (+ addend[h])) for elements [begin, end); addend may be
// null. Rows are of kType, addend and out of kOut; where these differ, kType is the type of sums.
template <DType kType, DType kOut = kType>
void sum_rows(const RowSum& sum, SumRule rule, const std::byte* addend, std::byte* out,
              std::int64_t begin, std::int64_t end) {
  using E = Element<kOut>;
  using Stored = typename E::Stored;
  static_assert(std::is_same_v<typename E::Sum, typename Element<kType>::Sum>);
  for (std::int64_t h = begin; h < end; ++h) {
    typename E::Sum acc = sum_element<kType>(sum, rule, h);
    if (addend != nullptr) acc = acc + E::load(reinterpret_cast<const Stored*>(addend)[h]);
    reinterpret_cast<Stored*>(out)[h] = E::store(acc);
  }
}

}  // namespace wherry::kernels::reference
