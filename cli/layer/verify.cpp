#include "layer/verify.hpp"

#include <algorithm>
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

LocalVerification verify_tokens(const SyntheticExperts& experts,
                                const std::vector<std::int64_t>& chosen, ConstTensorView x,
                                const Routing& routing, ConstTensorView y, int num_threads) {
  const auto count = static_cast<std::int64_t>(chosen.size());
  std::vector<std::int32_t> ids;
  std::vector<float> weights;
  for (const std::int64_t token : chosen) {
    for (int k = 0; k < routing.topk; ++k) {
      ids.push_back(static_cast<std::int32_t>(routing.id(token, k)));
      weights.push_back(routing.weight(token, k));
    }
  }
  const Expected expected =
      dense_reference(experts, Gathered(x, chosen).view(),
                      {ids.data(), weights.data(), count, routing.topk}, num_threads);
  const Comparison seen = compare(experts, expected, Gathered(y, chosen).view());
  return {
      .tokens = count,
      .max_error = seen.max_error,
      .tolerance = seen.tolerance,
      .passed = seen.passed,
      .worst_token = seen.worst_token < 0 ? -1 : chosen[static_cast<std::size_t>(seen.worst_token)],
      .worst_column = seen.worst_column};
}

}  // namespace wherry::cli
