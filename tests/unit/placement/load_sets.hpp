// Seeded loads of the shapes that real experts show.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

namespace wherry::test {

enum class LoadShape : std::uint8_t { uniform, lognormal_1, zipf_1_2, zipf_1_5, lognormal_3 };
constexpr LoadShape kLoadShapes[] = {LoadShape::uniform, LoadShape::lognormal_1,
                                     LoadShape::zipf_1_2, LoadShape::zipf_1_5,
                                     LoadShape::lognormal_3};

inline const char* name(LoadShape shape) {
  switch (shape) {
    case LoadShape::uniform: return "uniform";
    case LoadShape::lognormal_1: return "lognormal 1";
    case LoadShape::zipf_1_2: return "Zipf 1.2";
    case LoadShape::zipf_1_5: return "Zipf 1.5";
    case LoadShape::lognormal_3: return "lognormal 3";
  }
  return "?";
}

// Zipf loads are the exact law in random order for even seeds, and for odd ones the counts of
// 65536 choices drawn from it.
inline std::vector<double> make_loads(LoadShape shape, std::size_t experts, unsigned seed) {
  std::mt19937_64 random(1000 * static_cast<unsigned>(shape) + seed);
  std::uniform_real_distribution<double> uniform;
  std::normal_distribution<double> normal;
  std::vector<double> loads(experts);
  const bool zipf = shape == LoadShape::zipf_1_2 || shape == LoadShape::zipf_1_5;
  for (std::size_t e = 0; e < experts; ++e) {
    switch (shape) {
      case LoadShape::uniform: loads[e] = uniform(random); break;
      case LoadShape::lognormal_1: loads[e] = std::exp(normal(random)); break;
      case LoadShape::lognormal_3: loads[e] = std::exp(3 * normal(random)); break;
      case LoadShape::zipf_1_2: loads[e] = std::pow(static_cast<double>(e + 1), -1.2); break;
      case LoadShape::zipf_1_5: loads[e] = std::pow(static_cast<double>(e + 1), -1.5); break;
    }
  }
  if (zipf) std::shuffle(loads.begin(), loads.end(), random);
  if (zipf && seed % 2 == 1) {
    std::discrete_distribution<std::size_t> choose(loads.begin(), loads.end());
    std::fill(loads.begin(), loads.end(), 0.0);
    for (int i = 0; i < 65536; ++i) ++loads[choose(random)];
  }
  return loads;
}

}  // namespace wherry::test
