// The dense reference of the tests: y[t] = sum of w_k * f_e(x[t]), experts that differ from each
// other. Shares no code with the library; its bf16 rounding picks the nearer neighbour by comparing
// distances instead of by bit tricks.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "wherry/types.hpp"

namespace wherry::test {

struct Bf16 {
  std::uint16_t bits = 0;
};

inline float widen(Bf16 value) {
  const std::uint32_t bits = static_cast<std::uint32_t>(value.bits) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof(result));
  return result;
}

inline Bf16 narrow(float value) {
  if (std::isnan(value)) return {0x7FC0};
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const Bf16 toward_zero{static_cast<std::uint16_t>(bits >> 16)};
  const Bf16 away{static_cast<std::uint16_t>((bits >> 16) + 1)};
  if (std::isinf(value) || widen(toward_zero) == value) return toward_zero;
  // Infinity stands for the next power of two when distances are compared.
  const auto distance_value = [](Bf16 b) {
    return std::isinf(widen(b)) ? std::copysign(std::ldexp(1.0, 128), static_cast<double>(widen(b)))
                                : static_cast<double>(widen(b));
  };
  const double below = std::fabs(static_cast<double>(value) - distance_value(toward_zero));
  const double above = std::fabs(distance_value(away) - static_cast<double>(value));
  if (below != above) return below < above ? toward_zero : away;
  return (toward_zero.bits & 1) == 0 ? toward_zero : away;
}

// One element type: how a value of the oracle is kept in a row.
template <typename T>
struct Codec;
template <>
struct Codec<Bf16> {
  using Sum = float;
  static constexpr DType dtype = DType::bf16;
  static Sum load(Bf16 v) { return widen(v); }
  static Bf16 store(Sum v) { return narrow(v); }
};
template <>
struct Codec<_Float16> {
  using Sum = float;
  static constexpr DType dtype = DType::f16;
  static Sum load(_Float16 v) { return static_cast<float>(v); }
  static _Float16 store(Sum v) { return static_cast<_Float16>(v); }
};
template <>
struct Codec<float> {
  using Sum = float;
  static constexpr DType dtype = DType::f32;
  static Sum load(float v) { return v; }
  static float store(Sum v) { return v; }
};
template <>
struct Codec<double> {
  using Sum = double;
  static constexpr DType dtype = DType::f64;
  static Sum load(double v) { return v; }
  static double store(Sum v) { return v; }
};

// A global batch: tokens are numbered over all ranks; rank r owns [token_begin[r], token_begin[r+1]).
struct Batch {
  int experts = 0;
  int topk = 0;
  std::int64_t hidden = 0;
  std::vector<std::int64_t> token_begin;
  std::vector<std::int32_t> ids;  // [tokens, topk]
  std::vector<float> weights;     // [tokens, topk], sums differ from 1

  [[nodiscard]] int ranks() const { return static_cast<int>(token_begin.size()) - 1; }
  [[nodiscard]] std::int64_t tokens() const { return token_begin.back(); }
  [[nodiscard]] std::int64_t tokens_of(int rank) const {
    return token_begin[static_cast<std::size_t>(rank) + 1] -
           token_begin[static_cast<std::size_t>(rank)];
  }
  [[nodiscard]] std::int64_t max_tokens() const {
    std::int64_t most = 1;
    for (int r = 0; r < ranks(); ++r) most = std::max(most, tokens_of(r));
    return most;
  }
  [[nodiscard]] Routing routing_of(int rank) const {
    const std::int64_t first = token_begin[static_cast<std::size_t>(rank)] * topk;
    return {ids.data() + first, weights.data() + first, tokens_of(rank), topk};
  }
};

// Splits `tokens` contiguously and unevenly over `ranks`: shares grow like 1, 2, 3, ...; with more
// ranks than tokens some get none.
inline std::vector<std::int64_t> split_unevenly(std::int64_t tokens, int ranks) {
  std::vector<std::int64_t> begin{0};
  const std::int64_t parts = static_cast<std::int64_t>(ranks) * (ranks + 1) / 2;
  std::int64_t share = 0;
  for (int r = 0; r < ranks; ++r) {
    share += r + 1;
    begin.push_back(tokens * share / parts);
  }
  return begin;
}

// Distinct random experts a token; `empty` is the share of entries that become -1.
inline Batch make_batch(std::int64_t tokens, int ranks, int experts, int topk, std::int64_t hidden,
                        unsigned seed, double empty = 0.0) {
  Batch batch{experts, topk, hidden, split_unevenly(tokens, ranks), {}, {}};
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> uniform(0.0F, 1.0F);
  for (std::int64_t token = 0; token < tokens; ++token) {
    std::vector<std::int32_t> chosen;
    while (static_cast<int>(chosen.size()) < topk) {
      const auto id = static_cast<std::int32_t>(random() % static_cast<unsigned>(experts));
      bool again = false;
      for (const std::int32_t other : chosen) again = again || other == id;
      if (!again || static_cast<int>(chosen.size()) >= experts) chosen.push_back(id);
    }
    for (int k = 0; k < topk; ++k) {
      batch.ids.push_back(uniform(random) < empty ? -1 : chosen[static_cast<std::size_t>(k)]);
      batch.weights.push_back(0.05F + uniform(random));
    }
  }
  return batch;
}

// The payload tells who it is: different for every (token, column), in [1, 2) x sign.
template <typename T>
T token_value(std::int64_t token, std::int64_t column) {
  const auto mix = static_cast<std::uint64_t>(token * 7919 + column * 104729 + 13);
  const double fraction = static_cast<double>((mix * 0x9E3779B97F4A7C15ULL) >> 44) / 1048576.0;
  const double sign = (mix % 3 == 0) ? -1.0 : 1.0;
  return Codec<T>::store(static_cast<typename Codec<T>::Sum>(sign * (1.0 + fraction)));
}

// Expert e multiplies by 1 + e/64 and rounds to the row's type.
template <typename T>
T expert_value(int expert, T x) {
  using Sum = typename Codec<T>::Sum;
  return Codec<T>::store(Codec<T>::load(x) * (Sum{1} + static_cast<Sum>(expert) / Sum{64}));
}

// by_token, column by column.
template <typename T>
T dense_by_token(const Batch& batch, std::int64_t token, std::int64_t column) {
  using Sum = typename Codec<T>::Sum;
  Sum acc = 0;
  for (int k = 0; k < batch.topk; ++k) {
    const auto at = static_cast<std::size_t>(token * batch.topk + k);
    if (batch.ids[at] < 0) continue;
    const T y = expert_value<T>(batch.ids[at], token_value<T>(token, column));
    acc = std::fma(static_cast<Sum>(batch.weights[at]), Codec<T>::load(y), acc);
  }
  return Codec<T>::store(acc);
}

// by_rank, given which rank serves each choice.
template <typename T, typename RankOf>
T dense_by_rank(const Batch& batch, std::int64_t token, std::int64_t column, int ranks,
                RankOf rank_of_expert) {
  using Sum = typename Codec<T>::Sum;
  Sum total = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    Sum acc = 0;
    bool any = false;
    for (int k = 0; k < batch.topk; ++k) {
      const auto at = static_cast<std::size_t>(token * batch.topk + k);
      if (batch.ids[at] < 0 || rank_of_expert(batch.ids[at]) != rank) continue;
      const T y = expert_value<T>(batch.ids[at], token_value<T>(token, column));
      acc = std::fma(static_cast<Sum>(batch.weights[at]), Codec<T>::load(y), acc);
      any = true;
    }
    if (any) total += Codec<T>::load(Codec<T>::store(acc));
  }
  return Codec<T>::store(total);
}

}  // namespace wherry::test
