// The router again, written from the formulas in fp64 with the plainest means: full sorts, masks,
// std::exp. Shares nothing with src/route but the configuration.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <span>
#include <vector>

#include "wherry/router.hpp"

namespace reference {

using wherry::RouterConfig;
using wherry::Score;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Distance between neighbouring fp32 values at |x|.
inline double ulp32(double x) {
  const int exponent = std::max(std::ilogb(std::max(std::abs(x), 1e-300)), -126);
  return std::ldexp(1.0, exponent - 23);
}

inline std::vector<double> softmax(const std::vector<double>& x) {
  const double max = *std::max_element(x.begin(), x.end());
  std::vector<double> p(x.size());
  double sum = 0.0;
  for (std::size_t i = 0; i < x.size(); ++i) sum += p[i] = std::exp(x[i] - max);
  for (double& value : p) value /= sum;
  return p;
}

inline std::vector<double> scores(Score score, const std::vector<double>& x) {
  std::vector<double> s = x;
  if (score == Score::softmax) s = softmax(x);
  if (score == Score::sigmoid) {
    for (double& v : s) v = 1.0 / (1.0 + std::exp(-v));
  }
  if (score == Score::sqrtsoftplus) {
    for (double& v : s)
      v = std::sqrt(v > 0 ? v + std::log1p(std::exp(-v)) : std::log1p(std::exp(v)));
  }
  return s;
}

// Indices from the largest value down; equal values in index order.
inline std::vector<int> sorted(const std::vector<double>& values) {
  std::vector<int> order(values.size());
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](int a, int b) {
    const double value_a = values[static_cast<std::size_t>(a)];
    const double value_b = values[static_cast<std::size_t>(b)];
    return value_a != value_b ? value_a > value_b : a < b;
  });
  return order;
}

struct Row {
  std::vector<int> ids;
  std::vector<double> weights;
  // The gap at every cut (of the groups, of the experts) exceeds 8 fp32 ulp: fp32 must agree.
  bool clear = true;
};

// `order` is `values` sorted; is the step after the first `kept` of them a clear one?
inline bool clear_cut(const std::vector<double>& values, const std::vector<int>& order, int kept) {
  if (kept == static_cast<int>(order.size())) return true;
  const double last = values[static_cast<std::size_t>(order[static_cast<std::size_t>(kept - 1)])];
  const double next = values[static_cast<std::size_t>(order[static_cast<std::size_t>(kept)])];
  return next == -kInfinity || last - next > 8.0 * ulp32(last);
}

inline std::vector<double> weights_of(const RouterConfig& config, const std::vector<double>& x,
                                      const std::vector<int>& ids) {
  const std::vector<double> s = scores(config.score, x);
  std::vector<double> w(ids.size());
  for (std::size_t k = 0; k < w.size(); ++k) w[k] = s[static_cast<std::size_t>(ids[k])];
  if (config.score == Score::topk_softmax) {
    w = softmax(w);
  } else if (config.normalize) {
    const double sum = std::accumulate(w.begin(), w.end(), 0.0);
    for (double& v : w) v /= config.score == Score::softmax ? sum : sum + 1e-20;
  }
  for (double& v : w) v *= static_cast<double>(config.scale);
  return w;
}

inline Row route(const RouterConfig& config, std::span<const float> logits,
                 std::span<const float> bias) {
  const std::vector<double> x(logits.begin(), logits.end());
  std::vector<double> c = scores(config.score, x);
  for (std::size_t i = 0; i < bias.size(); ++i) c[i] += static_cast<double>(bias[i]);
  Row row;
  if (config.groups > 1) {
    const auto size = static_cast<std::size_t>(config.experts / config.groups);
    std::vector<double> group_scores;
    for (std::size_t g = 0; g < static_cast<std::size_t>(config.groups); ++g) {
      std::vector<double> group(c.begin() + static_cast<std::ptrdiff_t>(g * size),
                                c.begin() + static_cast<std::ptrdiff_t>((g + 1) * size));
      std::sort(group.rbegin(), group.rend());
      group_scores.push_back(size == 1 ? group[0] : group[0] + group[1]);
    }
    const std::vector<int> order = sorted(group_scores);
    row.clear = clear_cut(group_scores, order, config.groups_kept);
    for (std::size_t g = static_cast<std::size_t>(config.groups_kept); g < order.size(); ++g) {
      const auto dropped = static_cast<std::size_t>(order[g]);
      for (std::size_t i = 0; i < size; ++i) c[dropped * size + i] = -kInfinity;
    }
  }
  const std::vector<int> order = sorted(c);
  row.clear = row.clear && clear_cut(c, order, config.topk);
  row.ids.assign(order.begin(), order.begin() + config.topk);
  row.weights = weights_of(config, x, row.ids);
  return row;
}

// p [experts] of the balance losses.
inline std::vector<double> probabilities(Score score, const std::vector<double>& x) {
  if (score == Score::softmax || score == Score::topk_softmax) return softmax(x);
  std::vector<double> p = scores(score, x);
  const double sum = std::accumulate(p.begin(), p.end(), 0.0) + 1e-20;
  for (double& v : p) v /= sum;
  return p;
}

// Mean of p over the tokens [begin, end).
inline std::vector<double> mean_probability(const RouterConfig& config,
                                            std::span<const float> logits, std::size_t begin,
                                            std::size_t end) {
  const auto experts = static_cast<std::size_t>(config.experts);
  std::vector<double> mean(experts, 0.0);
  for (std::size_t t = begin; t < end; ++t) {
    const auto row = logits.subspan(t * experts, experts);
    const std::vector<double> p = probabilities(config.score, {row.begin(), row.end()});
    for (std::size_t i = 0; i < experts; ++i) mean[i] += p[i] / static_cast<double>(end - begin);
  }
  return mean;
}

// n numbers from N(0, sigma), the same on every machine: sums of uniforms, not libstdc++'s normal.
inline std::vector<float> gaussian(std::size_t n, double sigma, std::mt19937_64& engine) {
  std::vector<float> values(n);
  for (float& value : values) {
    double sum = 0.0;
    for (int i = 0; i < 4; ++i) sum += static_cast<double>(engine() >> 11) * 0x1p-53 - 0.5;
    value = static_cast<float>(sum * sigma * std::sqrt(3.0));
  }
  return values;
}

}  // namespace reference
