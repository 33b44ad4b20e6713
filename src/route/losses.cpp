// Every balance loss is sum_t sum_i g_i p_ti with a vector g that the gradient does not flow
// through; they differ in g. One pass over the logits gives the value and the gradient.
#include <algorithm>
#include <cmath>
#include <vector>

#include "route/checks.hpp"
#include "route/math.hpp"
#include "route/scores.hpp"
#include "wherry/router.hpp"

namespace wherry {
namespace {

using Counts = std::vector<std::int64_t>;

void check_balance(const RouterConfig& config, const BalanceInput& input, bool needs_ids,
                   std::span<const float> grad_logits) {
  config.check();
  check_tokens(input.tokens);
  check_length("logits", input.logits.size(), input.tokens, config.experts);
  if (needs_ids || !input.ids.empty()) {
    check_length("ids", input.ids.size(), input.tokens, config.topk);
    check_ids("token", 0, input.ids, config.topk, config.experts);
  }
  if (!grad_logits.empty()) {
    check_length("grad_logits", grad_logits.size(), input.tokens, config.experts);
  }
  WHERRY_CHECK_ARGUMENT(std::isfinite(input.coefficient), Stage::route,
                        "the coefficient of a loss is {}; allowed: finite values",
                        input.coefficient);
}

// ds/dx of a score that is not a softmax.
double slope(Score score, double x, double s) {
  const double e = route_math::exp_nonpositive(-std::abs(x));
  const double sigmoid = (x >= 0.0 ? 1.0 : e) / (1.0 + e);
  if (score == Score::sigmoid) return e / ((1.0 + e) * (1.0 + e));
  return s > 0.0 ? sigmoid / (2.0 * s) : 0.0;  // sqrt(softplus): tends to exp(x/2)/2
}

// p [experts] of one token with what its gradient needs.
class Probabilities {
 public:
  explicit Probabilities(const RouterConfig& config)
      : score_(config.score == Score::topk_softmax ? Score::softmax : config.score),
        p_(static_cast<std::size_t>(config.experts)) {}

  // sum_i g_i p_i
  double dot(std::int64_t token, std::span<const float> logits, std::span<const double> g) {
    score_all(score_, logits, checked_max(token, logits), p_);
    divisor_ = 1.0;
    if (score_ != Score::softmax) {
      divisor_ = 1e-20;
      for (const double s : p_) divisor_ += s;
    }
    dot_ = 0.0;
    for (std::size_t i = 0; i < p_.size(); ++i) dot_ += g[i] * (p_[i] / divisor_);
    return dot_;
  }

  // Adds d(dot)/d(logits). For a softmax p_i (g_i - dot); else through p_i = s_i / divisor.
  void add_gradient(std::span<const float> logits, std::span<const double> g,
                    std::span<float> grad) const {
    for (std::size_t i = 0; i < p_.size(); ++i) {
      const double ds = score_ == Score::softmax
                            ? p_[i]
                            : slope(score_, static_cast<double>(logits[i]), p_[i]) / divisor_;
      grad[i] = static_cast<float>(static_cast<double>(grad[i]) + ds * (g[i] - dot_));
    }
  }

 private:
  Score score_;
  std::vector<double> p_;  // softmax: p; else s
  double divisor_ = 1.0;
  double dot_ = 0.0;
};

// sum over tokens [begin, end) of sum_i g_i p_ti, and its gradient.
double sum_over_tokens(const BalanceInput& input, std::int64_t begin, std::int64_t end,
                       std::span<const double> g, Probabilities& p, std::span<float> grad_logits) {
  const std::size_t experts = g.size();
  double sum = 0.0;
  for (std::int64_t token = begin; token < end; ++token) {
    const std::size_t at = static_cast<std::size_t>(token) * experts;
    const std::span<const float> logits = input.logits.subspan(at, experts);
    sum += p.dot(token, logits, g);
    if (!grad_logits.empty()) p.add_gradient(logits, g, grad_logits.subspan(at, experts));
  }
  return sum;
}

std::vector<double> scaled(std::span<const std::int64_t> counts, double factor) {
  std::vector<double> g(counts.size());
  for (std::size_t i = 0; i < g.size(); ++i) g[i] = static_cast<double>(counts[i]) * factor;
  return g;
}

void count_into(std::span<const std::int32_t> ids, std::size_t step,
                std::span<std::int64_t> counts) {
  for (std::size_t i = 0; i < ids.size(); i += step) {
    if (ids[i] >= 0) ++counts[static_cast<std::size_t>(ids[i])];
  }
}

}  // namespace

void count_experts(const RouterConfig& config, std::span<const std::int32_t> ids,
                   std::span<std::int64_t> counts) {
  config.check();
  check_length("counts", counts.size(), 1, config.experts);
  check_ids("token", 0, ids, config.topk, config.experts);
  count_into(ids, 1, counts);
}

double first_choice_loss(const RouterConfig& config, const BalanceInput& input,
                         std::span<float> grad_logits) {
  check_balance(config, input, true, grad_logits);
  if (input.tokens == 0) return 0.0;
  Counts counts(static_cast<std::size_t>(config.experts));
  count_into(input.ids, static_cast<std::size_t>(config.topk), counts);
  const auto t = static_cast<double>(input.tokens);
  const std::vector<double> g = scaled(counts, input.coefficient * config.experts / (t * t));
  Probabilities p(config);
  return sum_over_tokens(input, 0, input.tokens, g, p, grad_logits);
}

double topk_loss(const RouterConfig& config, const BalanceInput& input,
                 std::span<float> grad_logits) {
  const std::int64_t whole[] = {0, input.tokens};
  return sequence_loss(config, input, whole, grad_logits);
}

double sequence_loss(const RouterConfig& config, const BalanceInput& input,
                     std::span<const std::int64_t> sequence_begin, std::span<float> grad_logits) {
  check_balance(config, input, true, grad_logits);
  WHERRY_CHECK_ARGUMENT(!sequence_begin.empty() && sequence_begin.front() == 0 &&
                            sequence_begin.back() == input.tokens,
                        Stage::route,
                        "sequence_begin must run from 0 to {} (tokens); it holds [{}]",
                        input.tokens, fmt::join(sequence_begin, ", "));
  std::int64_t sequences = 0;
  for (std::size_t q = 1; q < sequence_begin.size(); ++q) {
    WHERRY_CHECK_ARGUMENT(sequence_begin[q - 1] <= sequence_begin[q], Stage::route,
                          "sequence_begin[{}] is {}, below the {} before it; allowed: ascending", q,
                          sequence_begin[q], sequence_begin[q - 1]);
    sequences += sequence_begin[q - 1] < sequence_begin[q] ? 1 : 0;
  }
  const auto topk = static_cast<std::size_t>(config.topk);
  Counts counts(static_cast<std::size_t>(config.experts));
  std::vector<double> g(counts.size());
  Probabilities p(config);
  double loss = 0.0;
  for (std::size_t q = 1; q < sequence_begin.size(); ++q) {
    const std::int64_t begin = sequence_begin[q - 1];
    const std::int64_t end = sequence_begin[q];
    if (begin == end) continue;
    std::ranges::fill(counts, 0);
    count_into(input.ids.subspan(static_cast<std::size_t>(begin) * topk,
                                 static_cast<std::size_t>(end - begin) * topk),
               1, counts);
    const auto t = static_cast<double>(end - begin);
    const double factor =
        input.coefficient * config.experts / (config.topk * t * t) / static_cast<double>(sequences);
    std::ranges::transform(counts, g.begin(),
                           [&](std::int64_t n) { return static_cast<double>(n) * factor; });
    loss += sum_over_tokens(input, begin, end, g, p, grad_logits);
  }
  return loss;
}

double global_batch_loss(const RouterConfig& config, const BalanceInput& input,
                         std::span<const std::int64_t> global_counts, std::int64_t global_tokens,
                         std::span<float> grad_logits) {
  check_balance(config, input, false, grad_logits);
  check_length("global_counts", global_counts.size(), 1, config.experts);
  WHERRY_CHECK_ARGUMENT(global_tokens >= input.tokens, Stage::route,
                        "global_tokens is {}; allowed: {} (tokens of this rank) or more",
                        global_tokens, input.tokens);
  if (input.tokens == 0) return 0.0;
  const std::vector<double> g = scaled(
      global_counts,
      input.coefficient * config.experts /
          (config.topk * static_cast<double>(global_tokens) * static_cast<double>(input.tokens)));
  Probabilities p(config);
  return sum_over_tokens(input, 0, input.tokens, g, p, grad_logits);
}

double z_loss(const RouterConfig& config, const BalanceInput& input, std::span<float> grad_logits) {
  check_balance(config, input, false, grad_logits);
  const auto experts = static_cast<std::size_t>(config.experts);
  std::vector<double> e(experts);
  double sum_of_squares = 0.0;
  for (std::int64_t token = 0; token < input.tokens; ++token) {
    const std::size_t at = static_cast<std::size_t>(token) * experts;
    const std::span<const float> logits = input.logits.subspan(at, experts);
    const float max = checked_max(token, logits);
    const double sum = exponentials(logits, max, e);
    const double log_sum = static_cast<double>(max) + std::log(sum);
    sum_of_squares += log_sum * log_sum;
    if (grad_logits.empty()) continue;
    const std::span<float> grad = grad_logits.subspan(at, experts);
    const double factor =
        input.coefficient * 2.0 * log_sum / (sum * static_cast<double>(input.tokens));
    for (std::size_t i = 0; i < experts; ++i) {
      grad[i] = static_cast<float>(static_cast<double>(grad[i]) + factor * e[i]);
    }
  }
  return input.tokens == 0 ? 0.0
                           : input.coefficient * sum_of_squares / static_cast<double>(input.tokens);
}

void update_bias(std::span<const std::int64_t> counts, float rate, std::span<float> bias) {
  check_length("bias", bias.size(), static_cast<std::int64_t>(counts.size()), 1);
  WHERRY_CHECK_ARGUMENT(std::isfinite(rate), Stage::route, "rate is {}; allowed: finite values",
                        rate);
  __extension__ using Wide = __int128;  // sums and products of counts are exact
  Wide total = 0;
  for (std::size_t i = 0; i < counts.size(); ++i) {
    WHERRY_CHECK_ARGUMENT(counts[i] >= 0, Stage::route,
                          "the count of expert {} is {}; allowed: 0 or more", i, counts[i]);
    total += counts[i];
  }
  for (std::size_t i = 0; i < counts.size(); ++i) {
    const Wide scaled_count = static_cast<Wide>(counts[i]) * static_cast<Wide>(counts.size());
    if (scaled_count < total) bias[i] += rate;
    if (scaled_count > total) bias[i] -= rate;
  }
}

}  // namespace wherry
