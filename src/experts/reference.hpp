// The dense reference: what a layer of synthetic experts must give for a token, computed without
// any of the exchange, the plan or the experts stage; and how close a correct layer comes to it.
#pragma once

#include <cstdint>
#include <vector>

#include "experts/synthetic.hpp"
#include "wherry/types.hpp"

namespace wherry {

// y[t] = sum_k w_k f_e(x[t]) of some tokens, and what the size of an error is measured by.
struct Expected {
  std::int64_t tokens = 0;
  std::int64_t hidden = 0;
  std::vector<double> y;          // [tokens, hidden]
  std::vector<double> magnitude;  // [tokens, hidden]: sum_k |w_k f_e(x[t])|
  std::vector<double> scale;  // [tokens]: the rms that y[t] is expected to have; see tolerance()
};

// x [tokens, hidden] (bf16 or f32) and routing (logical experts, [tokens, topk]) of the tokens to
// verify, in any order. Makes each row of each needed weight matrix once and throws it away; sums
// in fp32 lanes joined in fp64. Blocking, `num_threads` threads. Throws bad_argument.
[[nodiscard]] Expected dense_reference(const SyntheticExperts& experts, ConstTensorView x,
                                       const Routing& routing, int num_threads = 1);

// Floating-point operations of dense_reference(): 6 hidden expert_hidden per (token, choice).
[[nodiscard]] double reference_flop(const SyntheticExperts& experts, std::int64_t choices) noexcept;

// Largest error of a correct layer, as compare() measures it; reference.cpp derives it.
[[nodiscard]] double tolerance(const SyntheticExperts& experts, DType dtype);

struct Comparison {
  double max_error = 0.0;  // max over (token, column) of |y - expected| / (scale + magnitude)
  double tolerance = 0.0;
  bool passed = false;  // every error is at most the tolerance; a NaN fails
  std::int64_t worst_token = -1, worst_column = -1;
};
// y [expected.tokens, hidden], bf16 or f32, of a layer whose experts computed in y's dtype. `beyond`
// is added to the tolerance: what else a correct layer may do to y, on the same scale.
[[nodiscard]] Comparison compare(const SyntheticExperts& experts, const Expected& expected,
                                 ConstTensorView y, double beyond = 0.0);

}  // namespace wherry
