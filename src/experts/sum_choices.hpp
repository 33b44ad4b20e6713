// The sum over the choices of one received row (layout `tokens`).
#pragma once

#include <cstdint>
#include <span>

#include "wherry/types.hpp"

namespace wherry::experts {

struct Term {
  float weight;
  const void* row;  // a result, [hidden] of the dtype below
};

// out[h] = round(fma(w_n, y_n[h], ... fma(w_0, y_0[h], 0))): by_rank's rule, the same bits on every
// processor. bf16 or f32.
void sum_choices(DType dtype, std::span<const Term> terms, std::int64_t hidden, void* out);

}  // namespace wherry::experts
