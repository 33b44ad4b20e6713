// What the examples share: a routing, experts that differ from each other, and the sum they must give.
#pragma once

#include <wherry/wherry.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <stdexcept>
#include <vector>

// Tokens of one rank and where they go.
struct Tokens {
  std::int64_t count, hidden;
  int topk;
  std::vector<float> x;           // [count, hidden]
  std::vector<std::int32_t> ids;  // [count, topk]
  std::vector<float> weights;     // [count, topk]
  std::vector<float> out;         // [count, hidden]

  Tokens(int rank, int experts, int topk_in, std::int64_t count_in, std::int64_t hidden_in)
      : count(count_in),
        hidden(hidden_in),
        topk(topk_in),
        out(static_cast<std::size_t>(count_in * hidden_in)) {
    for (std::int64_t t = 0; t < count; ++t) {
      for (std::int64_t h = 0; h < hidden; ++h) {
        x.push_back(static_cast<float>((rank * 7 + t * 3 + h) % 32));
      }
      for (int k = 0; k < topk; ++k) {
        ids.push_back(static_cast<std::int32_t>((t * 5 + k * 3 + rank) % experts));
        weights.push_back(0.5F / static_cast<float>(1 + k));
      }
    }
  }

  [[nodiscard]] wherry::Routing routing() const {
    return {ids.data(), weights.data(), count, topk};
  }
  [[nodiscard]] wherry::ConstTensorView rows() const {
    return {x.data(), wherry::DType::f32, count, hidden};
  }
  [[nodiscard]] wherry::TensorView sums() {
    return {{out.data(), wherry::DType::f32, count, hidden}};
  }

  // Throws where out is not the weighted sum of what the experts make of x, up to `error` of it.
  void check(float error = 1e-5F) const {
    for (std::int64_t t = 0; t < count; ++t) {
      float factor = 0;
      for (int k = 0; k < topk; ++k) {
        const auto choice = static_cast<std::size_t>(t * topk + k);
        factor += weights[choice] * static_cast<float>(ids[choice] + 1);
      }
      for (std::int64_t h = 0; h < hidden; ++h) {
        const auto at = static_cast<std::size_t>(t * hidden + h);
        const float want = factor * x[at];
        if (std::fabs(out[at] - want) > error * std::max(1.0F, 32.0F * factor)) {
          std::fprintf(stderr, "token %d, column %d: %g, expected %g\n", static_cast<int>(t),
                       static_cast<int>(h), static_cast<double>(out[at]),
                       static_cast<double>(want));
          throw std::runtime_error("the layer gave a wrong sum");
        }
      }
    }
  }
};

// Expert e of the examples multiplies by e + 1: `rows` rows of `x`, results to the same rows of `y`.
inline void run_expert(int expert, std::int64_t begin, std::int64_t rows,
                       const wherry::ConstTensorView& x, const wherry::TensorView& y) {
  for (std::int64_t row = begin; row < begin + rows; ++row) {
    const float* const in = x.row<float>(row);
    std::transform(in, in + x.cols, y.row<float>(row),
                   [expert](float value) { return static_cast<float>(expert + 1) * value; });
  }
}

// The experts of this rank, each on its own rows.
inline void run_experts(const wherry::Exchange& exchange, const wherry::Received& received,
                        const wherry::TensorView& y) {
  const wherry::Placement& placement = exchange.placement();
  const int first = placement.slot_begin()[static_cast<std::size_t>(exchange.rank())];
  for (std::size_t s = 0; s < received.slot_counts.size(); ++s) {
    const int expert = placement.slot_to_expert()[static_cast<std::size_t>(first) + s];
    run_expert(expert, received.slot_begin[s], received.slot_counts[s], received.rows, y);
  }
}
