// What a layer gives by its definition (docs/numerics.md), token by token, for every wire, reduction
// and weighting. Conversions between formats are the library's, proven in unit/format; the sums share
// nothing with it.
#pragma once

#include <cmath>
#include <optional>
#include <span>
#include <vector>

#include "support/layer.hpp"
#include "wherry/format.hpp"

namespace wherry::test {

// Rows in a wire format with the plane of their scales.
struct Wired {
  WireFormat format;
  std::vector<std::byte> payload;
  std::vector<std::byte> scales;
};

template <typename T>
Wired wired(const WireFormat& format, std::vector<T>& x) {
  const auto rows = static_cast<std::int64_t>(x.size()) / format.hidden;
  Wired result{format, {}, {}};
  result.payload.resize(static_cast<std::size_t>(rows * format.payload_bytes));
  result.scales.resize(static_cast<std::size_t>(scale_plane_bytes(format, rows)));
  if (rows == 0) return result;
  quantize(format, view(x, format.hidden),
           {result.payload.data(), result.scales.data(), rows, format.payload_bytes});
  return result;
}

// What x is worth after it has travelled, in elements of `To`.
template <typename To, typename T>
std::vector<To> after_travel(WireFormat format, std::vector<T> x) {
  const Wired there = wired(format, x);
  std::vector<To> back(x.size());
  if (x.empty()) return back;
  const auto rows = static_cast<std::int64_t>(x.size()) / format.hidden;
  format.dtype = Codec<To>::dtype;
  dequantize(format, {there.payload.data(), there.scales.data(), rows, format.payload_bytes},
             view(back, format.hidden));
  return back;
}

template <typename T>
std::vector<T> row_of(const Batch& batch, std::int64_t token) {
  std::vector<T> row(static_cast<std::size_t>(batch.hidden));
  for (std::size_t h = 0; h < row.size(); ++h) {
    row[h] = token_value<T>(token, static_cast<std::int64_t>(h));
  }
  return row;
}

// One choice of a token as it was planned.
struct Choice {
  int expert;  // -1: none, or dropped
  int rank;    // that serves it
  float weight;
};

// The sums of one token: what each expert gets is the token after its travel; what is summed are
// results (by_token) or sums of a rank (by_rank) after theirs, unrounded.
template <typename T>
class Expected {
 public:
  using Sum = typename Codec<T>::Sum;

  Expected(const ExchangeConfig& config, std::vector<T> x) : config_(config), x_(std::move(x)) {
    if (config.dispatch_wire != Wire::same) x_ = after_travel<T>(wire(config.dispatch_wire), x_);
  }

  [[nodiscard]] std::vector<T> sums(std::span<const Choice> choices,
                                    std::span<const T> addend = {}) const {
    std::vector<Sum> total =
        config_.effective_reduction() == Reduction::by_token ? by_token(choices) : by_rank(choices);
    std::vector<T> row(total.size());
    for (std::size_t h = 0; h < row.size(); ++h) {
      if (!addend.empty()) total[h] += Codec<T>::load(addend[h]);
      row[h] = Codec<T>::store(total[h]);
    }
    return row;
  }

 private:
  [[nodiscard]] WireFormat wire(Wire wire) const {
    return wire_format(wire, config_.dtype, config_.hidden);
  }
  // The expert rounds to T; `travelled`: its result goes home by itself, and is converted so.
  [[nodiscard]] std::vector<Sum> result(int expert, bool travelled) const {
    std::vector<T> y(x_);
    for (T& value : y) value = expert_value<T>(expert, value);
    if (travelled && config_.combine_wire != Wire::same) {
      return after_travel<Sum>(wire(config_.combine_wire), y);
    }
    return widened(y);
  }
  [[nodiscard]] static std::vector<Sum> widened(const std::vector<T>& y) {
    std::vector<Sum> wide(y.size());
    for (std::size_t h = 0; h < y.size(); ++h) wide[h] = Codec<T>::load(y[h]);
    return wide;
  }
  void add(std::vector<Sum>& acc, const Choice& choice, bool travelled) const {
    const std::vector<Sum> y = result(choice.expert, travelled);
    for (std::size_t h = 0; h < acc.size(); ++h) {
      acc[h] = std::fma(static_cast<Sum>(choice.weight), y[h], acc[h]);
    }
  }

  [[nodiscard]] std::vector<Sum> by_token(std::span<const Choice> choices) const {
    std::vector<Sum> acc(x_.size(), Sum{0});
    for (const Choice& choice : choices) {
      if (choice.expert >= 0) add(acc, choice, true);
    }
    return acc;
  }

  [[nodiscard]] std::vector<Sum> by_rank(std::span<const Choice> choices) const {
    int ranks = 0;
    for (const Choice& choice : choices) ranks = std::max(ranks, choice.rank + 1);
    std::vector<Sum> total(x_.size(), Sum{0});
    for (int rank = 0; rank < ranks; ++rank) {
      std::vector<Sum> acc(x_.size(), Sum{0});
      bool any = false;
      for (const Choice& choice : choices) {
        if (choice.expert < 0 || choice.rank != rank) continue;
        add(acc, choice, false);
        any = true;
      }
      if (!any) continue;
      const std::vector<Sum> home = after_home(acc);
      for (std::size_t h = 0; h < home.size(); ++h) total[h] += home[h];
    }
    return total;
  }
  // A rank's sum as home reads it.
  [[nodiscard]] std::vector<Sum> after_home(const std::vector<Sum>& acc) const {
    std::vector<T> rounded(acc.size());
    for (std::size_t h = 0; h < acc.size(); ++h) rounded[h] = Codec<T>::store(acc[h]);
    if (config_.combine_wire == Wire::same) return widened(rounded);
    if (config_.layout == Layout::tokens) {  // the caller has summed, and rounded to T
      return after_travel<Sum>(wire(config_.combine_wire), rounded);
    }
    return after_travel<Sum>(wire_format(config_.combine_wire, Codec<Sum>::dtype, config_.hidden),
                             acc);
  }

  const ExchangeConfig& config_;
  std::vector<T> x_;
};

// The choices of one token of a filled plan; `expert_of` says what the ids of the routing name.
// Under Weights::caller every weight is 1, and a row that serves two choices counts once.
template <typename ExpertOf>
std::vector<Choice> choices_of(const ExchangeConfig& config, const PlanData& plan,
                               std::int64_t token, ExpertOf expert_of) {
  std::vector<Choice> choices;
  for (int k = 0; k < plan.topk; ++k) {
    const auto at = static_cast<std::size_t>(token * plan.topk + k);
    const bool caller = config.weights == Weights::caller;
    const bool sent = plan.row[at] >= 0 && !(caller && plan.repeat[at] != 0);
    choices.push_back(
        {sent ? expert_of(plan.slot[at]) : -1, plan.dest[at], caller ? 1.0F : plan.weight[at]});
  }
  return choices;
}

}  // namespace wherry::test
