#include "stats.hpp"

#include <algorithm>
#include <cmath>

namespace wherry::cli {

Percentiles percentiles(std::vector<double> samples) {
  std::ranges::sort(samples);
  const auto nearest_rank = [&](double share) {
    const double rank = std::ceil(share * static_cast<double>(samples.size()));
    return samples[static_cast<std::size_t>(std::max(rank, 1.0)) - 1];
  };
  return {nearest_rank(0.5), nearest_rank(0.99)};
}

Json to_json(const Percentiles& percentiles) {
  const auto rounded = [](double value) { return std::round(value * 1e3) / 1e3; };
  return {{"p50", rounded(percentiles.p50)}, {"p99", rounded(percentiles.p99)}};
}

}  // namespace wherry::cli
