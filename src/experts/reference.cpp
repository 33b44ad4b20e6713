// How large an error a correct layer makes
// ----------------------------------------
// u is the unit roundoff of the dtype (bf16: 2^-8), v = 2^-24 that of fp32. With x and the weights
// exact in the dtype, a layer rounds
//   1. in the sums of gate and up, of n = hidden terms, and of down, of n = expert_hidden terms, in
//      fp32. A random walk: the error of a sum has the standard deviation v sqrt(n/6) times the
//      sum's own. silu(gate)*up turns relative errors of gate and up into at most 2.2 times as much
//      (rms); seven standard deviations of all three are below v (8 sqrt(hidden) +
//      4 sqrt(expert_hidden)), relative to the rms of the result.
//   2. h = silu(gate)*up to the dtype: |dh_i| <= u |h_i|, of either sign. y_k(c) gets
//      sum_i W(c,i) dh_i, a sum of independent terms of mean 0, each at most u b |h_i|, where b
//      bounds the weights; all choices together at most u b |w_k h_ki|. With
//          scale^2 = sum_k w_k^2 |h_k|^2 b^2 / 3
//      (the weights are uniform in [-b, b]: this is the mean square of y over its columns) the
//      standard deviation is at most u scale / sqrt(3). 4 u scale is at least 6.9 of them for any
//      size: never in practice.
//   3. y_k(c) to the dtype, then perhaps the sum over the choices on one rank, then the sum over
//      all: each at most u magnitude(c), magnitude(c) = sum_k |w_k y_k(c)|. Together 3 u magnitude.
//   4. the sum over k by fp32 fused multiply-add: topk v magnitude; topk <= 32.
// So |y - expected| <= (4 u + v (32 + 8 sqrt(hidden) + 4 sqrt(expert_hidden))) (scale + magnitude).
// For scale: the wrong expert, a lost choice or a swapped weight gives errors near 1, one row that
// carries another token's result as well; bf16's tolerance is 1/64.
#include "experts/reference.hpp"

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <span>
#include <thread>

#include "kernels/numerics.hpp"
#include "support/check.hpp"

namespace wherry {
namespace {

struct Choice {
  std::int64_t token;
  double weight;
};
// The choices of every expert that has any.
using Choices = std::map<int, std::vector<Choice>>;

constexpr std::int64_t kLanes = 16;

// fp32 in 16 lanes (four registers of any x86-64), joined in fp64.
double dot(const float* a, const float* b, std::int64_t n) {
  float lanes[kLanes] = {};
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (std::int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] += a[i + lane] * b[i + lane];
  }
  double sum = 0.0;
  for (const float lane : lanes) sum += static_cast<double>(lane);
  for (; i < n; ++i) sum += static_cast<double>(a[i]) * static_cast<double>(b[i]);
  return sum;
}

float element(ConstTensorView view, std::int64_t row, std::int64_t col) {
  return view.dtype == DType::f32 ? view.row<float>(row)[col]
                                  : bf16_to_float(view.row<std::uint16_t>(row)[col]);
}

void check_view(ConstTensorView view, std::int64_t rows, std::int64_t cols, const char* what) {
  WHERRY_CHECK_ARGUMENT(view.dtype == DType::f32 || view.dtype == DType::bf16, Stage::experts,
                        "the reference reads bf16 or f32; {} is {}", what, name(view.dtype));
  WHERRY_CHECK_ARGUMENT(view.rows == rows && view.cols == cols, Stage::experts,
                        "{} is [{}, {}]; the reference needs [{}, {}]", what, view.rows, view.cols,
                        rows, cols);
}

std::vector<float> to_floats(ConstTensorView view) {
  std::vector<float> values(static_cast<std::size_t>(view.rows * view.cols));
  for (std::int64_t row = 0; row < view.rows; ++row) {
    for (std::int64_t col = 0; col < view.cols; ++col) {
      values[static_cast<std::size_t>(row * view.cols + col)] = element(view, row, col);
    }
  }
  return values;
}

Choices choices_by_expert(const Routing& routing) {
  Choices choices;
  for (std::int64_t token = 0; token < routing.tokens; ++token) {
    for (int k = 0; k < routing.topk; ++k) {
      const std::int64_t id = routing.id(token, k);
      if (id < 0) continue;
      choices[static_cast<int>(id)].push_back(
          {token, static_cast<double>(routing.weight(token, k))});
    }
  }
  return choices;
}

// fn(begin, end) over parts of [0, count), one a thread.
void in_parts(std::int64_t count, int num_threads,
              const std::function<void(std::int64_t, std::int64_t)>& fn) {
  std::vector<std::jthread> others;
  for (int part = 1; part < num_threads; ++part) {
    others.emplace_back(fn, count * part / num_threads, count * (part + 1) / num_threads);
  }
  fn(0, count / num_threads);
}

std::span<float> row_of(std::vector<float>& matrix, std::int64_t row, std::int64_t cols) {
  return std::span(matrix).subspan(static_cast<std::size_t>(row * cols),
                                   static_cast<std::size_t>(cols));
}

// silu(gate)*up of every choice, [choices in the order of `choices`, expert_hidden].
void activate(const SyntheticExperts& experts, const std::vector<float>& x, const Choices& choices,
              std::int64_t begin, std::int64_t end, std::vector<float>& activations) {
  const std::int64_t hidden = experts.hidden;
  std::vector<float> gate(static_cast<std::size_t>(hidden)), up(gate.size());
  std::int64_t first = 0;
  for (const auto& [expert, of_expert] : choices) {
    for (std::int64_t i = begin; i < end; ++i) {
      experts.fill_row(expert, Matrix::gate, i, std::span(gate));
      experts.fill_row(expert, Matrix::up, i, std::span(up));
      for (std::size_t at = 0; at < of_expert.size(); ++at) {
        const float* const token = x.data() + of_expert[at].token * hidden;
        const double g = dot(token, gate.data(), hidden);
        const double result = g / (1.0 + std::exp(-g)) * dot(token, up.data(), hidden);
        const std::int64_t row = first + static_cast<std::int64_t>(at);
        row_of(activations, row, experts.expert_hidden)[static_cast<std::size_t>(i)] =
            static_cast<float>(result);
      }
    }
    first += static_cast<std::int64_t>(of_expert.size());
  }
}

// Adds W_down times the activations, weighted, for the columns [begin, end) of y.
void project(const SyntheticExperts& experts, const Choices& choices,
             const std::vector<float>& activations, std::int64_t begin, std::int64_t end,
             Expected& expected) {
  const std::int64_t inner = experts.expert_hidden;
  std::vector<float> down(static_cast<std::size_t>(inner));
  std::int64_t first = 0;
  for (const auto& [expert, of_expert] : choices) {
    for (std::int64_t column = begin; column < end; ++column) {
      experts.fill_row(expert, Matrix::down, column, std::span(down));
      for (std::size_t at = 0; at < of_expert.size(); ++at) {
        const float* const h = activations.data() + (first + static_cast<std::int64_t>(at)) * inner;
        const double term = of_expert[at].weight * dot(h, down.data(), inner);
        const auto to = static_cast<std::size_t>(of_expert[at].token * experts.hidden + column);
        expected.y[to] += term;
        expected.magnitude[to] += std::abs(term);
      }
    }
    first += static_cast<std::int64_t>(of_expert.size());
  }
}

void add_scales(const SyntheticExperts& experts, const Choices& choices,
                const std::vector<float>& activations, std::vector<double>& scale) {
  const double bound = static_cast<double>(experts.bound(Matrix::down));
  const float* h = activations.data();
  for (const auto& [expert, of_expert] : choices) {
    for (const Choice& choice : of_expert) {
      const double squares = dot(h, h, experts.expert_hidden);
      scale[static_cast<std::size_t>(choice.token)] +=
          choice.weight * choice.weight * squares * bound * bound / 3.0;
      h += experts.expert_hidden;
    }
  }
  for (double& value : scale) value = std::sqrt(value);
}

}  // namespace

double reference_flop(const SyntheticExperts& experts, std::int64_t choices) noexcept {
  return 6.0 * static_cast<double>(experts.hidden) * static_cast<double>(experts.expert_hidden) *
         static_cast<double>(choices);
}

Expected dense_reference(const SyntheticExperts& experts, ConstTensorView x, const Routing& routing,
                         int num_threads) {
  check_view(x, routing.tokens, experts.hidden, "x");
  WHERRY_CHECK_ARGUMENT(num_threads >= 1, Stage::experts, "num_threads is {}", num_threads);
  const std::vector<float> tokens = to_floats(x);
  const Choices choices = choices_by_expert(routing);
  std::size_t num_choices = 0;
  for (const auto& [expert, of_expert] : choices) num_choices += of_expert.size();

  Expected expected;
  expected.tokens = routing.tokens;
  expected.hidden = experts.hidden;
  expected.y.resize(tokens.size());
  expected.magnitude.resize(tokens.size());
  expected.scale.resize(static_cast<std::size_t>(routing.tokens));
  std::vector<float> activations(num_choices * static_cast<std::size_t>(experts.expert_hidden));
  in_parts(experts.expert_hidden, num_threads, [&](std::int64_t begin, std::int64_t end) {
    activate(experts, tokens, choices, begin, end, activations);
  });
  in_parts(experts.hidden, num_threads, [&](std::int64_t begin, std::int64_t end) {
    project(experts, choices, activations, begin, end, expected);
  });
  add_scales(experts, choices, activations, expected.scale);
  return expected;
}

double tolerance(const SyntheticExperts& experts, DType dtype) {
  const double v = 0x1p-24;
  const double u = dtype == DType::bf16 ? 0x1p-8 : v;
  return 4.0 * u + v * (32.0 + 8.0 * std::sqrt(static_cast<double>(experts.hidden)) +
                        4.0 * std::sqrt(static_cast<double>(experts.expert_hidden)));
}

Comparison compare(const SyntheticExperts& experts, const Expected& expected, ConstTensorView y,
                   double beyond) {
  check_view(y, expected.tokens, expected.hidden, "y");
  Comparison result;
  result.tolerance = tolerance(experts, y.dtype) + beyond;
  for (std::int64_t token = 0; token < expected.tokens; ++token) {
    for (std::int64_t column = 0; column < expected.hidden; ++column) {
      const auto at = static_cast<std::size_t>(token * expected.hidden + column);
      const double size = expected.scale[static_cast<std::size_t>(token)] + expected.magnitude[at];
      const double difference =
          std::abs(static_cast<double>(element(y, token, column)) - expected.y[at]);
      const double error = difference == 0.0 ? 0.0 : difference / size;  // no choices: exactly 0
      if (error <= result.max_error) continue;
      result.max_error = error;
      result.worst_token = token;
      result.worst_column = column;
      if (std::isnan(error)) return result;  // failed
    }
  }
  result.passed = result.max_error <= result.tolerance;
  return result;
}

}  // namespace wherry
