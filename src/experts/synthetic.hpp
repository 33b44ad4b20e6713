// Weights and tokens that any rank can make from (seed, place) alone: of the command line, the tests
// and the benchmarks. Every value is an odd integer in [-255, 255] times a power of two: exact in
// bf16, never zero, and the same bits on every machine.
#pragma once

#include <cstdint>
#include <span>

#include "wherry/experts.hpp"
#include "wherry/types.hpp"

namespace wherry {

// The weights of every expert of one layer. A cheap value; any number of threads may use it.
struct SyntheticExperts {
  std::uint64_t seed = 1;
  std::int64_t hidden = 0;
  std::int64_t expert_hidden = 0;

  [[nodiscard]] std::int64_t rows(Matrix matrix) const noexcept;
  [[nodiscard]] std::int64_t cols(Matrix matrix) const noexcept;
  // No weight of `matrix` is larger: about sqrt(3 / fan-in), so that outputs are of the size of the
  // inputs.
  [[nodiscard]] float bound(Matrix matrix) const noexcept;

  // One row of a matrix, [cols(matrix)], as fp32 or as bf16: the same values.
  void fill_row(int expert, Matrix matrix, std::int64_t row, std::span<float> out) const;
  void fill_row(int expert, Matrix matrix, std::int64_t row, std::span<std::uint16_t> out) const;

  // For GatedMlp; holds a copy of *this.
  [[nodiscard]] WeightSource source() const;
};

// Fills x [n, hidden] (bf16 or f32) with the tokens first_token ... first_token + n - 1 of the
// global batch: values in (-2, 2), rms 1.15, a function of (seed, token, column) alone.
void fill_synthetic_tokens(std::uint64_t seed, std::int64_t first_token, TensorView x);

}  // namespace wherry
