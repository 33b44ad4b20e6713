// combine_recv: the results of a token, pulled from the ranks that made them and summed at home.
#include <cmath>
#include <cstring>

#include "kernels/reference/elements.hpp"
#include "kernels/reference/reference.hpp"

namespace wherry::kernels::reference {

namespace {

template <DType kType>
void sum_token(const CombineRecv& a, std::int64_t token, Moved& moved) {
  using E = Element<kType>;
  using Stored = typename E::Stored;
  using Sum = typename E::Sum;
  const Windows& w = a.windows;
  Source sources[kMaxTopk];
  const Stored* rows[kMaxTopk];
  const int count = sources_of(a.plan, a.mode, token, sources);
  for (int i = 0; i < count; ++i) {
    const auto row = static_cast<std::uint64_t>(sources[i].row);
    const std::uint64_t at = a.mode.sums_partials() ? w.layout.partial(w.generation, row)
                                                    : w.layout.result(w.generation, row);
    rows[i] = reinterpret_cast<const Stored*>(w.base[sources[i].peer] + at);
    ++moved.rows;
    moved.link_rows += sources[i].peer != w.rank ? 1 : 0;
  }
  const bool weighted = a.mode.reduction == Reduction::by_token;
  const auto* addend = a.addend != nullptr
                           ? reinterpret_cast<const Stored*>(a.addend + token * a.addend_pitch)
                           : nullptr;
  auto* out = reinterpret_cast<Stored*>(a.out + token * a.out_pitch);
  for (std::int64_t h = 0; h < a.mode.hidden; ++h) {
    Sum sum = 0;
    for (int i = 0; i < count; ++i) {
      const Sum value = E::load(rows[i][h]);
      sum = weighted ? std::fma(static_cast<Sum>(sources[i].weight), value, sum) : sum + value;
    }
    if (addend != nullptr) sum += E::load(addend[h]);
    out[h] = E::store(sum);
  }
}

void fetch_scalars(const CombineRecv& a, std::int64_t token) {
  const Windows& w = a.windows;
  for (std::int64_t at = token * a.plan.topk; at < (token + 1) * a.plan.topk; ++at) {
    float scalar = 0.0F;
    if (a.plan.row[at] >= 0) {
      const auto row = static_cast<std::uint64_t>(a.plan.row[at]);
      std::memcpy(&scalar, w.base[a.plan.dest[at]] + w.layout.result_scalar(w.generation, row),
                  sizeof(scalar));
    }
    a.scalars_out[at] = scalar;
  }
}

}  // namespace

Moved combine_recv(const CombineRecv& a, std::int64_t begin, std::int64_t end) {
  Moved moved;
  with_element(a.mode.dtype, [&]<DType kType>() {
    for (std::int64_t token = begin; token < end; ++token) sum_token<kType>(a, token, moved);
  });
  if (a.scalars_out != nullptr) {
    for (std::int64_t token = begin; token < end; ++token) fetch_scalars(a, token);
  }
  return moved;
}

}  // namespace wherry::kernels::reference
