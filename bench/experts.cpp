#include "experts.hpp"

#include <algorithm>
#include <cstring>
#include <vector>

namespace wherry::bench {

namespace {

void run_token_rows(const Received& received, Experts experts, int topk, int first_slot,
                    const TensorView& results) {
  std::vector<float> sum(static_cast<std::size_t>(results.cols));
  for (std::int64_t row = 0; row < received.rows.rows; ++row) {
    std::fill(sum.begin(), sum.end(), 0.0F);
    const auto* const x = received.rows.row<std::uint16_t>(row);
    const auto choices = received.choices.subspan(static_cast<std::size_t>(row * topk),
                                                  static_cast<std::size_t>(topk));
    for (const Received::TokenChoice& choice : choices) {
      if (choice.local_slot < 0) continue;
      const int slot = first_slot + choice.local_slot;
      if (experts == Experts::identity) {
        for (std::size_t h = 0; h < sum.size(); ++h) sum[h] += choice.weight * widen(x[h]);
      } else {
        for (std::size_t h = 0; h < sum.size(); ++h)
          sum[h] += choice.weight * widen(expert_value(experts, slot, x[h]));
      }
    }
    auto* const y = results.row<std::uint16_t>(row);
    for (std::size_t h = 0; h < sum.size(); ++h) y[h] = narrow(sum[h]);
  }
}

}  // namespace

void run_experts(const Exchange& exchange, const Received& received, Experts experts,
                 const TensorView& results) {
  const int first_slot =
      exchange.placement().slot_begin()[static_cast<std::size_t>(exchange.rank())];
  if (exchange.config().layout == Layout::tokens) {
    run_token_rows(received, experts, exchange.config().topk, first_slot, results);
    return;
  }
  const auto row_bytes = static_cast<std::size_t>(results.row_bytes());
  for (std::size_t local = 0; local < received.slot_counts.size(); ++local) {
    const std::int64_t begin = received.slot_begin[local];
    for (std::int64_t row = begin; row < begin + received.slot_counts[local]; ++row) {
      const auto* const x = received.rows.row<std::uint16_t>(row);
      auto* const y = results.row<std::uint16_t>(row);
      if (experts == Experts::identity) {
        std::memcpy(y, x, row_bytes);
        continue;
      }
      const int slot = first_slot + static_cast<int>(local);
      for (std::int64_t h = 0; h < results.cols; ++h) y[h] = expert_value(experts, slot, x[h]);
    }
  }
}

}  // namespace wherry::bench
