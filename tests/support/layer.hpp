// Runs one synthetic layer through an exchange on one rank, and says in words where it differs from
// the dense reference. Failures are exceptions, so that they cross a fork.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "support/oracle.hpp"
#include "wherry/wherry.hpp"

namespace wherry::test {

inline void expect(bool good, const std::string& message) {
  if (!good) throw std::runtime_error(message);
}

// Every legal layout and reduction, and who sums.
struct LegalPair {
  Layout layout;
  Reduction reduction;
  SumAt sum_at = SumAt::home;
};
inline constexpr LegalPair kLegalPairs[] = {{Layout::grouped, Reduction::by_token},
                                            {Layout::grouped, Reduction::by_rank},
                                            {Layout::grouped, Reduction::by_rank, SumAt::expert},
                                            {Layout::tokens, Reduction::by_rank},
                                            {Layout::slots, Reduction::by_token},
                                            {Layout::slots, Reduction::by_rank},
                                            {Layout::slots, Reduction::by_rank, SumAt::expert}};

// Under `replicated` a batch has one part for each set of ranks that hold the same tokens.
inline int home_of(const Exchange& exchange) {
  return exchange.rank() / exchange.config().replicated;
}
// The tokens of that part whose sums combine gives this rank, [begin, end).
inline std::pair<std::int64_t, std::int64_t> home_range(const Exchange& exchange,
                                                        const Batch& batch) {
  const std::int64_t tokens = batch.tokens_of(home_of(exchange));
  const ExchangeConfig& config = exchange.config();
  if (config.combine_to == CombineTo::all) return {0, tokens};
  const int place = exchange.rank() % config.replicated;
  return {tokens * place / config.replicated, tokens * (place + 1) / config.replicated};
}

template <typename T>
std::vector<T> tokens_of(const Batch& batch, int rank) {
  std::vector<T> x;
  for (std::int64_t t = batch.token_begin[static_cast<std::size_t>(rank)];
       t < batch.token_begin[static_cast<std::size_t>(rank) + 1]; ++t) {
    for (std::int64_t h = 0; h < batch.hidden; ++h) x.push_back(token_value<T>(t, h));
  }
  return x;
}

// The experts of this rank: y row of each received row.
template <typename T>
void apply_experts(const Exchange& exchange, const Received& received, TensorView y) {
  using Sum = typename Codec<T>::Sum;
  const Placement& placement = exchange.placement();
  const int first_slot = placement.slot_begin()[static_cast<std::size_t>(exchange.rank())];
  const auto expert_of = [&](std::int64_t local) {
    return placement.slot_to_expert()[static_cast<std::size_t>(first_slot + local)];
  };
  const std::int64_t hidden = exchange.config().hidden;
  if (exchange.config().layout == Layout::tokens) {
    for (std::int64_t row = 0; row < received.rows.rows; ++row) {
      for (std::int64_t h = 0; h < hidden; ++h) {
        Sum acc = 0;
        for (int k = 0; k < exchange.config().topk; ++k) {
          const auto& choice =
              received.choices[static_cast<std::size_t>(row * exchange.config().topk + k)];
          if (choice.local_slot < 0) continue;
          const T value =
              expert_value<T>(expert_of(choice.local_slot), received.rows.row<T>(row)[h]);
          acc = std::fma(static_cast<Sum>(choice.weight), Codec<T>::load(value), acc);
        }
        y.row<T>(row)[h] = Codec<T>::store(acc);
      }
    }
    return;
  }
  for (std::size_t s = 0; s < received.slot_counts.size(); ++s) {
    for (std::int64_t i = 0; i < received.slot_counts[s]; ++i) {
      const std::int64_t row = received.slot_begin[s] + i;
      for (std::int64_t h = 0; h < hidden; ++h) {
        y.row<T>(row)[h] =
            expert_value<T>(expert_of(static_cast<std::int64_t>(s)), received.rows.row<T>(row)[h]);
      }
    }
  }
}

template <typename T>
TensorView view(std::vector<T>& data, std::int64_t hidden) {
  TensorView v;
  v.data = data.data();
  v.dtype = Codec<T>::dtype;
  v.cols = hidden;
  v.rows = static_cast<std::int64_t>(data.size()) / hidden;
  return v;
}

// Compares bit for bit; names the first token that differs.
template <typename T>
void expect_dense(const Exchange& exchange, const Batch& batch, const std::vector<T>& out) {
  const Placement& placement = exchange.placement();
  const auto rank_of_expert = [&](int expert) {
    return placement.slot_to_rank()[static_cast<std::size_t>(placement.slots_of(expert)[0])];
  };
  const int rank = exchange.rank();
  const auto [begin, end] = home_range(exchange, batch);
  const std::int64_t first = batch.token_begin[static_cast<std::size_t>(home_of(exchange))] + begin;
  expect(static_cast<std::int64_t>(out.size()) == (end - begin) * batch.hidden,
         fmt::format("rank {}: {} elements came home", rank, out.size()));
  for (std::int64_t t = 0; t < end - begin; ++t) {
    const std::int64_t token = first + t;
    for (std::int64_t h = 0; h < batch.hidden; ++h) {
      const T want = exchange.config().effective_reduction() == Reduction::by_token
                         ? dense_by_token<T>(batch, token, h)
                         : dense_by_rank<T>(batch, token, h, exchange.size(), rank_of_expert);
      const T got = out[static_cast<std::size_t>(t * batch.hidden + h)];
      expect(
          std::ranges::equal(std::as_bytes(std::span(&want, 1)), std::as_bytes(std::span(&got, 1))),
          fmt::format("rank {}, token {}, column {}: expected {}, got {}", rank, token, h,
                      static_cast<double>(Codec<T>::load(want)),
                      static_cast<double>(Codec<T>::load(got))));
    }
  }
}

inline ExchangeConfig config_for(const Batch& batch, DType dtype = DType::bf16) {
  ExchangeConfig config;
  config.experts = batch.experts;
  config.topk = batch.topk;
  config.hidden = batch.hidden;
  config.max_tokens = batch.max_tokens();
  config.dtype = dtype;
  config.reduction = Reduction::by_token;
  config.populate = false;
  config.deadline = Seconds(30);
  return config;
}

// plan, dispatch, experts, combine; returns out of this rank.
template <typename T>
std::vector<T> run_layer(Exchange& exchange, const Batch& batch) {
  const int home = home_of(exchange);
  Plan plan = exchange.make_plan();
  exchange.plan(batch.routing_of(home), plan);
  std::vector<T> x = tokens_of<T>(batch, home);
  std::vector<T> out(static_cast<std::size_t>(plan.home_tokens() * batch.hidden));
  const Received received = exchange.dispatch(plan, view(x, batch.hidden));
  const TensorView y = exchange.combine_input(plan);
  apply_experts<T>(exchange, received, y);
  exchange.combine(plan, y, view(out, batch.hidden));
  return out;
}

template <typename T>
void run_and_verify(Group& group, const Batch& batch, ExchangeConfig config) {
  config.dtype = Codec<T>::dtype;
  Exchange exchange(group, config);
  expect_dense<T>(exchange, batch, run_layer<T>(exchange, batch));
}

}  // namespace wherry::test
