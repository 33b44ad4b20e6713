// combine_send: with by_rank, what this rank has of a token is summed before it goes home.
#include <cmath>

#include "kernels/reference/elements.hpp"
#include "kernels/reference/reference.hpp"

namespace wherry::kernels::reference {

namespace {

template <DType kType>
void sum_token_row(const CombineSend& a, std::int64_t row) {
  using E = Element<kType>;
  using Stored = typename E::Stored;
  using Sum = typename E::Sum;
  const Windows& w = a.windows;
  std::byte* const base = w.base[w.rank];
  const auto* entries = reinterpret_cast<const layout::TokenEntry*>(
      base + w.layout.token_entries(w.generation, static_cast<std::uint64_t>(row)));
  auto* const partial = reinterpret_cast<Stored*>(
      base + w.layout.partial(w.generation, static_cast<std::uint64_t>(row)));
  for (std::int64_t h = 0; h < a.mode.hidden; ++h) {
    Sum sum = 0;
    for (int k = 0; k < a.topk; ++k) {
      if (entries[k].position < 0) continue;
      const auto* result = reinterpret_cast<const Stored*>(
          base + w.layout.result(w.generation, static_cast<std::uint64_t>(entries[k].position)));
      sum = std::fma(static_cast<Sum>(entries[k].weight), E::load(result[h]), sum);
    }
    partial[h] = E::store(sum);
  }
}

}  // namespace

void combine_send(const CombineSend& a, std::int64_t begin, std::int64_t end) {
  with_element(a.mode.dtype, [&]<DType kType>() {
    for (std::int64_t row = begin; row < end; ++row) sum_token_row<kType>(a, row);
  });
}

}  // namespace wherry::kernels::reference
