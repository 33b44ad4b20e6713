#include "layer/verify.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace wherry::cli {

namespace {

constexpr double kFlopForAll = 20e9;
constexpr std::int64_t kTokensElse = 64;

// The chosen rows of a matrix, one after the other.
class Gathered {
 public:
  Gathered(ConstTensorView from, const std::vector<std::int64_t>& chosen)
      : bytes_(chosen.size() * static_cast<std::size_t>(from.row_bytes())),
        view_(bytes_.data(), from.dtype, static_cast<std::int64_t>(chosen.size()), from.cols) {
    const auto row_bytes = static_cast<std::size_t>(from.row_bytes());
    for (std::size_t i = 0; i < chosen.size(); ++i) {
      std::memcpy(bytes_.data() + i * row_bytes, from.row(chosen[i]), row_bytes);
    }
  }
  [[nodiscard]] const ConstTensorView& view() const noexcept { return view_; }

 private:
  std::vector<std::byte> bytes_;
  ConstTensorView view_;
};

}  // namespace

std::vector<std::int64_t> tokens_to_verify(int ranks, int rank, std::int64_t tokens,
                                           double flop_of_all) {
  std::int64_t count = tokens;
  if (flop_of_all >= kFlopForAll) {
    const std::int64_t share = kTokensElse / ranks + (rank < kTokensElse % ranks ? 1 : 0);
    count = std::min(tokens, std::max<std::int64_t>(2, share));
  }
  std::vector<std::int64_t> chosen;
  chosen.reserve(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i) {
    chosen.push_back(count == 1 ? 0 : i * (tokens - 1) / (count - 1));
  }
  return chosen;
}

// A result, or the sum of a rank, of block maximum m comes home with each element v changed by at
// most `relative` |v| + `absolute` m: half a step of the format at v, half its smallest step, and what
// the rounding of the block's scale may clip. |v| is part of the magnitude. m stays below 8 times the rms of a row, which for
// term k is scale_k; sum_k scale_k <= sqrt(topk) scale.
double wire_tolerance(const WireFormat& wire, int topk) {
  if (wire.keeps_dtype()) return 0.0;
  double relative = 0.0;
  double absolute = 0.0;
  switch (wire.wire) {
    case Wire::same:
    case Wire::raw:
    case Wire::f32:
    case Wire::f64: return 0.0;
    case Wire::bf16: relative = 0x1p-8; break;
    case Wire::f16: relative = 0x1p-11; break;
    case Wire::e4m3_block128:
    case Wire::e4m3_block128_pow2:
    case Wire::e4m3_block128_deepep:
    case Wire::e4m3_block128_deepep_pow2:
    case Wire::mxfp8_e4m3:
      relative = 0x1p-4;
      absolute = 0x1p-10 / 224;  // a power of two may be twice the scale
      break;
    case Wire::e5m2_block128:
    case Wire::e5m2_block128_pow2:
    case Wire::mxfp8_e5m2:
      relative = 0x1p-3;
      absolute = 0x1p-17 / 28672;
      break;
    case Wire::nvfp4:
      relative = 0x1p-2 + 0x1p-4;
      absolute = 0.25 / 6.0 * 1.0625;
      break;
    case Wire::int8_token: absolute = 0.5 / 127.0; break;
  }
  return relative + absolute * 8.0 * std::sqrt(static_cast<double>(topk));
}

LocalVerification verify_tokens(const SyntheticExperts& experts,
                                const std::vector<std::int64_t>& chosen, ConstTensorView x,
                                const Routing& routing, ConstTensorView y,
                                const WireFormat& combine_wire, int num_threads) {
  const auto count = static_cast<std::int64_t>(chosen.size());
  std::vector<std::int32_t> ids;
  std::vector<float> weights;
  for (const std::int64_t token : chosen) {
    for (int k = 0; k < routing.topk; ++k) {  // no weights: 1 everywhere
      ids.push_back(static_cast<std::int32_t>(routing.id(token, k)));
      weights.push_back(routing.weight(token, k));
    }
  }
  const Expected expected =
      dense_reference(experts, Gathered(x, chosen).view(),
                      {ids.data(), weights.data(), count, routing.topk}, num_threads);
  const Comparison seen = compare(experts, expected, Gathered(y, chosen).view(),
                                  wire_tolerance(combine_wire, routing.topk));
  return {
      .tokens = count,
      .max_error = seen.max_error,
      .tolerance = seen.tolerance,
      .passed = seen.passed,
      .worst_token = seen.worst_token < 0 ? -1 : chosen[static_cast<std::size_t>(seen.worst_token)],
      .worst_column = seen.worst_column};
}

}  // namespace wherry::cli
