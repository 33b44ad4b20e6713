// Compiled once per instruction set by Highway (foreach_target.h includes this file again for each).
// Where the hardware has no fused multiply-add, std::fma computes the same bits, slowly.
#include "experts/sum_choices.hpp"

#include <cmath>
#include <limits>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "experts/sum_choices.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "kernels/reference/elements.hpp"

HWY_BEFORE_NAMESPACE();
namespace wherry::experts::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

#if HWY_TARGET <= HWY_AVX2 || HWY_TARGET == HWY_NEON
using Floats = hn::ScalableTag<float>;

hn::Vec<Floats> load(Floats d, const float* from) { return hn::LoadU(d, from); }
hn::Vec<Floats> load(Floats d, const std::uint16_t* from) {
  const hn::Rebind<std::uint16_t, Floats> d16;
  const hn::RebindToUnsigned<Floats> d32;
  return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(d32, hn::LoadU(d16, from))));
}
void store(Floats d, hn::Vec<Floats> sum, float* out) {
  const auto nan = hn::Set(d, std::numeric_limits<float>::quiet_NaN());
  hn::StoreU(hn::IfThenElse(hn::IsNaN(sum), nan, sum), d, out);
}
// float_to_bf16() of every lane.
void store(Floats d, hn::Vec<Floats> sum, std::uint16_t* out) {
  const hn::Rebind<std::uint16_t, Floats> d16;
  const hn::RebindToUnsigned<Floats> d32;
  const auto bits = hn::BitCast(d32, sum);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(d32, 1));
  const auto rounded = hn::ShiftRight<16>(hn::Add(hn::Add(bits, hn::Set(d32, 0x7FFF)), odd));
  const auto is_nan = hn::RebindMask(d32, hn::IsNaN(sum));
  const auto result = hn::IfThenElse(is_nan, hn::Set(d32, 0x7FC0), rounded);
  hn::StoreU(hn::TruncateTo(d16, result), d16, out);
}

template <typename Element>
std::int64_t sum_vectors(const Term* terms, std::size_t count, std::int64_t hidden, Element* out) {
  const Floats d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  std::int64_t h = 0;
  for (; h + lanes <= hidden; h += lanes) {
    auto sum = hn::Zero(d);
    for (std::size_t i = 0; i < count; ++i) {
      const auto* row = static_cast<const Element*>(terms[i].row);
      sum = hn::MulAdd(hn::Set(d, terms[i].weight), load(d, row + h), sum);
    }
    store(d, sum, out + h);
  }
  return h;
}
#else
template <typename Element>
std::int64_t sum_vectors(const Term*, std::size_t, std::int64_t, Element*) {
  return 0;
}
#endif

template <DType kType>
void sum_row(const Term* terms, std::size_t count, std::int64_t hidden, void* out_row) {
  using E = kernels::Element<kType>;
  using Stored = typename E::Stored;
  auto* const out = static_cast<Stored*>(out_row);
  for (std::int64_t h = sum_vectors(terms, count, hidden, out); h < hidden; ++h) {
    float sum = 0.0F;
    for (std::size_t i = 0; i < count; ++i) {
      sum = std::fma(terms[i].weight, E::load(static_cast<const Stored*>(terms[i].row)[h]), sum);
    }
    out[h] = E::store(sum);
  }
}

void sum_f32(const Term* terms, std::size_t count, std::int64_t hidden, void* out) {
  sum_row<DType::f32>(terms, count, hidden, out);
}
void sum_bf16(const Term* terms, std::size_t count, std::int64_t hidden, void* out) {
  sum_row<DType::bf16>(terms, count, hidden, out);
}

}  // namespace wherry::experts::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace wherry::experts {
HWY_EXPORT(sum_f32);
HWY_EXPORT(sum_bf16);

void sum_choices(DType dtype, std::span<const Term> terms, std::int64_t hidden, void* out) {
  if (dtype == DType::f32) {
    HWY_DYNAMIC_DISPATCH(sum_f32)(terms.data(), terms.size(), hidden, out);
  } else {
    HWY_DYNAMIC_DISPATCH(sum_bf16)(terms.data(), terms.size(), hidden, out);
  }
}

}  // namespace wherry::experts
#endif
