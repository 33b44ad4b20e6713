// Conversions to and from wires of 8 bits by vectors. Included once per target; equal to
// reference/convert_blocks.hpp bit by bit, which takes the blocks that these functions decline.
//
// A block is taken if its largest magnitude lies in [2^-60, 2^120] (or is 0). Then nothing below
// overflows, and nothing that decides a rounding underflows, so that
// - no code needs a clamp: what is encoded is at most the format's largest value, up to a rounding
//   that encodes to the same,
// - a division can be made of multiply-adds (divided()), which is four times as fast.
#include <cstdint>

#include "hwy/highway.h"
#include "kernels/cpu/sum-inl.hpp"
#include "kernels/reference/convert_blocks.hpp"

#if defined(WHERRY_CPU_CONVERT_INL) == defined(HWY_TARGET_TOGGLE)
#ifdef WHERRY_CPU_CONVERT_INL
#undef WHERRY_CPU_CONVERT_INL
#else
#define WHERRY_CPU_CONVERT_INL
#endif

HWY_BEFORE_NAMESPACE();
namespace wherry::kernels::cpu {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using DFloat = hn::ScalableTag<float>;
using DBits = hn::Rebind<std::uint32_t, DFloat>;
using DInt = hn::Rebind<std::int32_t, DFloat>;
using DBytes = hn::Rebind<std::uint8_t, DFloat>;
using VFloat = hn::Vec<DFloat>;
using VBits = hn::Vec<DBits>;

[[nodiscard]] HWY_INLINE bool takes(std::uint32_t amax) {
  constexpr std::uint32_t kSmallest = (127U - 60U) << 23;
  constexpr std::uint32_t kLargest = (127U + 120U) << 23;
  return (amax >= kSmallest && amax <= kLargest) || amax == 0;
}

// The largest magnitude of [begin, end), as fp32 bits. Whole vectors: at least 32 elements.
template <DType kDType>
[[nodiscard]] HWY_INLINE std::uint32_t largest_magnitude(const std::byte* x, std::size_t begin,
                                                         std::size_t end) {
  if constexpr (kDType == DType::bf16) {
    const hn::ScalableTag<std::int16_t> d;
    const auto* row = reinterpret_cast<const std::int16_t*>(x);
    const auto mask = hn::Set(d, 0x7FFF);
    auto most = hn::Zero(d);
    for (std::size_t i = begin; i < end; i += hn::Lanes(d)) {
      most = hn::Max(most, hn::And(mask, hn::LoadU(d, row + i)));
    }
    const auto top = hn::GetLane(hn::MaxOfLanes(d, most));
    return static_cast<std::uint32_t>(static_cast<std::uint16_t>(top)) << 16;
  } else {
    const DInt d;
    const auto mask = hn::Set(d, 0x7FFFFFFF);
    auto most = hn::Zero(d);
    for (std::size_t i = begin; i < end; i += hn::Lanes(d)) {
      most = hn::Max(most, hn::And(mask, hn::BitCast(d, Vectors<kDType>::load(x, i))));
    }
    return static_cast<std::uint32_t>(hn::GetLane(hn::MaxOfLanes(d, most)));
  }
}

// x / scale, rounded as the division rounds it. With y the rounded reciprocal, two steps make an
// estimate within one unit of the last place, and the third is Markstein's theorem: q + (x - q
// scale) y rounds to the quotient. Signs of zeros are lost: take them from x.
[[nodiscard]] HWY_INLINE VFloat divided(VFloat x, VFloat scale, VFloat y) {
  const VFloat estimate = hn::Mul(x, y);
  const VFloat close = hn::MulAdd(hn::NegMulAdd(estimate, scale, x), y, estimate);
  return hn::MulAdd(hn::NegMulAdd(close, scale, x), y, close);
}

// Codes of an 8-bit float with the sign of x, one in the low byte of each lane; the rest is noise.
// A float 2^20 (for 3 bits of mantissa) above the value's exponent, but not below that of the
// smallest normal, has the format's step as its last place: adding it rounds, and the low byte of
// the sum counts the steps. It starts from kStart, which makes up for the bias of the exponents and
// the implicit bit.
template <typename Format>
[[nodiscard]] HWY_INLINE VBits encoded(VFloat value, VFloat x) {
  const DFloat df;
  const DBits d;
  const DInt di;
  constexpr int kDropped = 23 - Format::kMantissa;
  constexpr std::uint32_t kStart = -((128U - Format::kBias) << Format::kMantissa) & 0xFFU;
  static_assert(kStart % 2 == 0, "the sum must round to even where the code does");
  const auto magnitude = hn::And(hn::BitCast(d, value), hn::Set(d, 0x7FFFFFFFU));
  const auto field = hn::BitCast(di, hn::And(magnitude, hn::Set(d, kInfinityBits)));
  const auto smallest = hn::Set(di, static_cast<std::int32_t>(Format::kMinNormalBits));
  const auto exponent = hn::BitCast(d, hn::Max(field, smallest));
  constexpr std::uint32_t kAbove = (static_cast<std::uint32_t>(kDropped) << 23) + kStart;
  const auto above = hn::Add(exponent, hn::Set(d, kAbove));
  const auto sum = hn::Add(hn::BitCast(df, magnitude), hn::BitCast(df, above));
  const auto code = hn::Add(hn::BitCast(d, sum), hn::ShiftRight<kDropped>(exponent));
  return hn::OrAnd(code, hn::ShiftRight<24>(hn::BitCast(d, x)), hn::Set(d, 0x80U));
}

struct TakenBlock {
  BlockScale scale;
  bool taken;
};

template <DType kDType, typename Format, ScaleRule kRule>
[[nodiscard]] HWY_INLINE TakenBlock scale_block(const WireFormat& format, const std::byte* x,
                                                std::int64_t block) {
  const auto begin = static_cast<std::size_t>(block * format.block);
  const std::uint32_t amax =
      largest_magnitude<kDType>(x, begin, begin + static_cast<std::size_t>(format.block));
  TakenBlock result{block_scale<Format, kRule>(amax), takes(amax)};
  if constexpr (kRule == ScaleRule::exact) result.scale.by = 1.0F / result.scale.scale;
  return result;
}

template <DType kDType, typename Format, ScaleRule kRule>
HWY_INLINE void encode_block(const WireFormat& format, const std::byte* x, std::byte* payload,
                             std::int64_t block, const BlockScale& scale) {
  const DFloat d;
  const VFloat by = hn::Set(d, scale.by);
  const VFloat divisor = hn::Set(d, scale.scale);
  const auto begin = static_cast<std::size_t>(block * format.block);
  const std::size_t end = begin + static_cast<std::size_t>(format.block);
  auto* out = reinterpret_cast<std::uint8_t*>(payload);
  for (std::size_t i = begin; i < end; i += hn::Lanes(d)) {
    const VFloat v = Vectors<kDType>::load(x, i);
    const VFloat q = kRule == ScaleRule::exact ? divided(v, divisor, by) : hn::Mul(v, by);
    hn::StoreU(hn::TruncateTo(DBytes(), encoded<Format>(q, v)), DBytes(), out + i);
  }
}

// Scales of some blocks first, then their codes: one block's reduction ends in a chain of
// dependent steps, which those of the next fill.
template <DType kDType, typename Format, ScaleRule kRule>
HWY_ATTR void quantize_blocks(const WireFormat& format, const std::byte* x, std::byte* payload,
                              std::byte* scales) {
  constexpr std::int64_t kAtOnce = 16;
  const std::int64_t whole = format.hidden / format.block;
  for (std::int64_t first = 0; first < whole; first += kAtOnce) {
    const std::int64_t last = std::min(first + kAtOnce, whole);
    TakenBlock blocks[kAtOnce];
    for (std::int64_t b = first; b < last; ++b) {
      blocks[b - first] = scale_block<kDType, Format, kRule>(format, x, b);
    }
    for (std::int64_t b = first; b < last; ++b) {
      const TakenBlock& block = blocks[b - first];
      if (block.taken) {
        put_block_scale(format, scales, b, block.scale);
        encode_block<kDType, Format, kRule>(format, x, payload, b, block.scale);
      } else {
        reference::quantize_block<kDType, Format, kRule>(format, x, payload, scales, b);
      }
    }
  }
  if (whole < format.num_blocks) {
    reference::quantize_block<kDType, Format, kRule>(format, x, payload, scales, whole);
  }
}

template <DType kDType>
HWY_ATTR void quantize_int8(const WireFormat& format, const std::byte* x, std::byte* payload,
                            std::byte* scales) {
  const DFloat d;
  const std::size_t lanes = hn::Lanes(d);
  const auto hidden = static_cast<std::size_t>(format.hidden);
  const std::size_t whole = hidden - hidden % (4 * lanes);
  std::uint32_t amax = largest_magnitude<kDType>(x, 0, whole);
  const reference::Row<kDType> row(x);
  for (std::size_t i = whole; i < hidden; ++i) {
    amax = std::max(amax, magnitude_bits(row[static_cast<std::int64_t>(i)]));
  }
  if (!takes(amax)) return reference::quantize_int8<kDType>(format, x, payload, scales);
  const float scale = int8_scale(amax);
  reference::put_float(scales, scale);
  const VFloat divisor = hn::Set(d, scale);
  const VFloat reciprocal = hn::Set(d, 1.0F / scale);
  const VFloat shift = hn::Set(d, 12582912.0F);  // as float_to_int8: the code is the low byte
  auto* out = reinterpret_cast<std::uint8_t*>(payload);
  std::size_t i = 0;
  for (; i < whole; i += lanes) {
    const VFloat q = divided(Vectors<kDType>::load(x, i), divisor, reciprocal);
    const auto bits = hn::BitCast(DBits(), hn::Add(q, shift));
    hn::StoreU(hn::TruncateTo(DBytes(), bits), DBytes(), out + i);
  }
  for (; i < hidden; ++i) {
    payload[i] = static_cast<std::byte>(int8_encode(row[static_cast<std::int64_t>(i)], scale));
  }
}

// ---- Back ----------------------------------------------------------------------------------------

// An 8-bit float is an f16 with fewer bits: e5m2 its upper half, e4m3 one with its exponent 8 less,
// whose subnormals and zeros are f16's too.
template <typename Format>
[[nodiscard]] HWY_INLINE VFloat decoded(const std::uint8_t* codes) {
  const hn::Rebind<std::uint16_t, DFloat> d16;
  const hn::Rebind<hwy::float16_t, DFloat> half;
  const auto code = hn::PromoteTo(d16, hn::LoadU(DBytes(), codes));
  if constexpr (Format::kMantissa == 2) {
    return hn::PromoteTo(DFloat(), hn::BitCast(half, hn::ShiftLeft<8>(code)));
  } else {
    const auto magnitude = hn::And(code, hn::Set(d16, std::uint16_t{0x7F}));
    const auto sign = hn::ShiftLeft<8>(hn::And(code, hn::Set(d16, std::uint16_t{0x80})));
    const auto bits = hn::Or(sign, hn::ShiftLeft<7>(magnitude));
    const auto nan = hn::Eq(magnitude, hn::Set(d16, std::uint16_t{0x7F}));
    const auto all = hn::IfThenElse(nan, hn::Set(d16, std::uint16_t{0x7E00}), bits);
    return hn::PromoteTo(DFloat(), hn::BitCast(half, all));
  }
}

template <DType kDType, typename Format>
HWY_ATTR void dequantize_blocks(const WireFormat& format, const std::byte* payload,
                                const std::byte* scales, std::byte* x) {
  const DFloat d;
  const std::size_t lanes = hn::Lanes(d);
  const auto* codes = reinterpret_cast<const std::uint8_t*>(payload);
  constexpr float kBehind = Format::kMantissa == 2 ? 1.0F : 256.0F;  // what decoded() falls short
  for (std::int64_t block = 0; block < format.num_blocks; ++block) {
    const std::int64_t begin = block * format.block;
    const std::int64_t end = begin + format.block;
    const float scale = get_block_scale(format, scales, block);
    if (end > format.hidden || magnitude_bits(scale) >= (127U + 119U) << 23) {
      reference::dequantize_blocks<kDType, Format>(format, payload, scales, x, begin,
                                                   std::min(end, format.hidden));
      continue;
    }
    const VFloat by = hn::Set(d, scale * kBehind);
    for (auto i = static_cast<std::size_t>(begin); i < static_cast<std::size_t>(end);
         i += 2 * lanes) {
      Vectors<kDType>::template store_pair<false>(hn::Mul(decoded<Format>(codes + i), by),
                                                  hn::Mul(decoded<Format>(codes + i + lanes), by),
                                                  x, i);
    }
  }
}

template <DType kDType>
HWY_ATTR void dequantize_int8(const WireFormat& format, const std::byte* payload,
                              const std::byte* scales, std::byte* x) {
  const DFloat d;
  const hn::Rebind<std::int8_t, DFloat> d8;
  const std::size_t lanes = hn::Lanes(d);
  const auto* codes = reinterpret_cast<const std::int8_t*>(payload);
  const float scale = reference::get_float(scales);
  const auto hidden = static_cast<std::size_t>(format.hidden);
  const VFloat by = hn::Set(d, scale);
  const auto values = [&](std::size_t i) HWY_ATTR {
    const auto whole = hn::PromoteTo(DInt(), hn::LoadU(d8, codes + i));
    return hn::Mul(hn::ConvertTo(d, whole), by);
  };
  std::size_t i = 0;
  for (; i + 2 * lanes <= hidden; i += 2 * lanes) {
    Vectors<kDType>::template store_pair<false>(values(i), values(i + lanes), x, i);
  }
  auto* out = reinterpret_cast<typename Element<kDType>::Stored*>(x);
  for (; i < hidden; ++i) out[i] = Element<kDType>::store(static_cast<float>(codes[i]) * scale);
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace wherry::kernels::cpu
HWY_AFTER_NAMESPACE();

#endif
