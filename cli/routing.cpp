#include "routing.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "wherry/router.hpp"

namespace wherry::cli {

namespace {

// splitmix64: every input bit reaches every output bit.
std::uint64_t mix(std::uint64_t value) {
  value += 0x9E3779B97F4A7C15ULL;
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9ULL;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EBULL;
  return value ^ (value >> 31);
}

float gumbel(std::uint64_t bits) {
  const double uniform = (static_cast<double>(bits >> 11) + 0.5) * 0x1p-53;  // never 0 or 1
  return static_cast<float>(-std::log(-std::log(uniform)));
}

std::vector<float> log_popularity(const RoutingOptions& options, int experts) {
  std::vector<int> place(static_cast<std::size_t>(experts));  // 1: the most popular
  std::iota(place.begin(), place.end(), 1);
  std::mt19937_64 random(options.seed);
  for (std::size_t i = place.size(); i > 1; --i) std::swap(place[i - 1], place[random() % i]);
  std::vector<float> result;
  result.reserve(place.size());
  for (const int p : place) result.push_back(static_cast<float>(-options.skew * std::log(p)));
  return result;
}

std::vector<float> selection_bias(const RoutingOptions& options, int experts) {
  constexpr double kLargest = 0.02;
  std::vector<float> result;
  for (int e = 0; e < experts; ++e) {
    const std::uint64_t bits = mix(mix(~options.seed) + static_cast<std::uint64_t>(e));
    const double uniform = static_cast<double>(bits >> 11) * 0x1p-53;
    result.push_back(static_cast<float>(kLargest * (2.0 * uniform - 1.0)));
  }
  return result;
}

}  // namespace

TokenRouting synthetic_routing(const RoutingOptions& options, const RouterConfig& router,
                               std::int64_t first_token, std::int64_t tokens) {
  constexpr std::int64_t kBlock = 1024;  // tokens whose logits exist at once
  const std::vector<float> popularity = log_popularity(options, router.experts);
  const std::vector<float> bias =
      router.bias ? selection_bias(options, router.experts) : std::vector<float>();
  const auto topk = static_cast<std::int64_t>(router.topk);
  const auto entries = static_cast<std::size_t>(tokens * topk);
  TokenRouting result{std::vector<std::int32_t>(entries), std::vector<float>(entries), tokens,
                      router.topk, router.weight_on_input};
  std::vector<float> logits;
  for (std::int64_t begin = 0; begin < tokens; begin += kBlock) {
    const std::int64_t count = std::min(kBlock, tokens - begin);
    logits.clear();
    for (std::int64_t t = begin; t < begin + count; ++t) {
      const std::uint64_t token =
          mix(mix(options.seed) + static_cast<std::uint64_t>(first_token + t));
      for (std::size_t e = 0; e < popularity.size(); ++e) {
        logits.push_back(popularity[e] + gumbel(mix(token + e)));
      }
    }
    const auto from = static_cast<std::size_t>(begin * topk);
    const auto size = static_cast<std::size_t>(count * topk);
    static_cast<void>(route(router, {.tokens = count, .logits = logits, .bias = bias},
                            std::span(result.ids).subspan(from, size),
                            std::span(result.weights).subspan(from, size)));
  }
  return result;
}

}  // namespace wherry::cli
