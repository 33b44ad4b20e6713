// What the tests of the experts share: owned matrices, an oracle in fp64, and the suite that runs
// once for every implementation (plain_test.cpp and onednn_test.cpp name them).
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <ostream>
#include <random>
#include <string>
#include <vector>

#include "experts/synthetic.hpp"
#include "kernels/numerics.hpp"
#include "wherry/error.hpp"
#include "wherry/experts.hpp"

namespace wherry::test {

// A matrix of bf16 or f32 with rows `pitch` bytes apart, filled with a byte pattern.
class Rows {
 public:
  Rows(DType dtype, std::int64_t rows, std::int64_t cols, std::int64_t extra_bytes = 0)
      : pitch_(cols * dtype_bytes(dtype) + extra_bytes) {
    bytes_.assign(static_cast<std::size_t>(rows * pitch_), kFill);
    view_.data = bytes_.data();
    view_.dtype = dtype;
    view_.rows = rows;
    view_.cols = cols;
    view_.pitch_bytes = pitch_;
  }
  Rows(const Rows&) = delete;
  Rows& operator=(const Rows&) = delete;

  static constexpr std::byte kFill{0xA5};

  [[nodiscard]] TensorView view() const { return view_; }
  [[nodiscard]] float at(std::int64_t row, std::int64_t col) const {
    return view_.dtype == DType::f32 ? view_.row<float>(row)[col]
                                     : bf16_to_float(view_.row<std::uint16_t>(row)[col]);
  }
  [[nodiscard]] std::vector<std::byte> row(std::int64_t i) const {
    return {view_.row(i), view_.row(i) + view_.row_bytes()};
  }
  [[nodiscard]] bool untouched(std::int64_t i) const {
    return row(i) == std::vector<std::byte>(static_cast<std::size_t>(view_.row_bytes()), kFill);
  }

 private:
  std::vector<std::byte> bytes_;
  TensorView view_;
  std::int64_t pitch_;
};

// y = f_e(x) of one row in fp64, from the synthetic weights row by row.
inline std::vector<double> mlp_oracle(const SyntheticExperts& experts, int expert,
                                      const std::vector<double>& x) {
  const auto product = [&](Matrix matrix, const std::vector<double>& input) {
    std::vector<float> row(static_cast<std::size_t>(experts.cols(matrix)));
    std::vector<double> result;
    for (std::int64_t r = 0; r < experts.rows(matrix); ++r) {
      experts.fill_row(expert, matrix, r, std::span(row));
      double sum = 0.0;
      for (std::size_t c = 0; c < row.size(); ++c) sum += static_cast<double>(row[c]) * input[c];
      result.push_back(sum);
    }
    return result;
  };
  std::vector<double> hidden = product(Matrix::gate, x);
  const std::vector<double> up = product(Matrix::up, x);
  for (std::size_t i = 0; i < hidden.size(); ++i) {
    hidden[i] = hidden[i] / (1.0 + std::exp(-hidden[i])) * up[i];
  }
  return product(Matrix::down, hidden);
}

// What dispatch gives in layout `tokens`.
inline Received received_tokens(TensorView rows, std::span<const std::int64_t> slot_counts,
                                std::span<const std::int64_t> slot_begin,
                                std::span<const Received::TokenChoice> choices = {},
                                std::span<const std::int32_t> gather = {}) {
  Received received;
  received.rows = rows;
  received.slot_counts = slot_counts;
  received.slot_begin = slot_begin;
  received.choices = choices;
  received.gather = gather;
  return received;
}

struct Kind {
  const char* implementation;
  DType dtype;
};
inline std::ostream& operator<<(std::ostream& out, const Kind& kind) {
  return out << kind.implementation << "_" << name(kind.dtype);
}
inline std::string kind_name(const ::testing::TestParamInfo<Kind>& info) {
  return ::testing::PrintToString(info.param);
}

class GatedMlpTest : public ::testing::TestWithParam<Kind> {
 protected:
  [[nodiscard]] DType dtype() const { return GetParam().dtype; }
  [[nodiscard]] ExpertsConfig config(const SyntheticExperts& experts, int num_threads = 1) const {
    return {.hidden = experts.hidden,
            .expert_hidden = experts.expert_hidden,
            .dtype = dtype(),
            .num_threads = num_threads,
            .implementation = GetParam().implementation};
  }
  // Skips, loudly, where the machine lacks what the implementation needs.
  void SetUp() override {
    try {
      const SyntheticExperts experts{.seed = 1, .hidden = 8, .expert_hidden = 8};
      const GatedMlp mlp(config(experts), {}, experts.source());
    } catch (const Error& error) {
      if (error.code() == ErrorCode::unsupported) GTEST_SKIP() << error.what();
      throw;
    }
  }
};

}  // namespace wherry::test
