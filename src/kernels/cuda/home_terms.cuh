// What combine sums where results go home in another format than they have, and for rows of f64: by the
// same rules as row_sum.cuh, in one plain loop over the terms, of any dtype and format.
#pragma once

#include <cstdint>

#include "kernels/cuda/formats.cuh"
#include "kernels/cuda/row_sum.cuh"

namespace wherry::kernels::cuda {

struct HomeTerm {
  const std::byte* row;
  std::byte* scales;  // of this row alone
  float weight;
  bool last_of_rank;  // Sum::ranked: the last term of its rank
};
using HomeTerms = HomeTerm[kMaxTopk];

template <typename C>
__device__ void add_weighted(typename C::Values& sum, float weight,
                             const typename C::Values& values) {
#pragma unroll
  for (int i = 0; i < C::kElements; ++i) {
    sum.of[i] = fma(static_cast<typename C::Value>(weight), values.of[i], sum.of[i]);
  }
}
template <typename C>
__device__ void add(typename C::Values& sum, const typename C::Values& values) {
#pragma unroll
  for (int i = 0; i < C::kElements; ++i) sum.of[i] = sum.of[i] + values.of[i];
}

}  // namespace wherry::kernels::cuda
