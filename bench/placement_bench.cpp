// How long a placement takes and how even it is: 58 layers of 256 experts in 288 slots of 32 ranks,
// on one core, for several shapes of load. One JSON object a shape, on one line.
//
// usage: placement_bench [layers]
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "wherry/placement.hpp"

namespace {

using Loads = std::vector<std::vector<double>>;
using Draw = std::function<double(std::mt19937_64&, int expert)>;

constexpr int kExperts = 256;
constexpr wherry::BalanceConfig kConfig{.ranks = 32, .slots = 288};

Loads make_loads(int layers, const Draw& draw) {
  std::mt19937_64 random(1);
  Loads loads;
  for (int layer = 0; layer < layers; ++layer) {
    std::vector<double>& row = loads.emplace_back();
    for (int e = 0; e < kExperts; ++e) row.push_back(draw(random, e));
    std::shuffle(row.begin(), row.end(), random);
  }
  return loads;
}

struct Run {
  double seconds;
  double imbalance;  // mean over the layers
};

Run run(const Loads& loads, wherry::BalancePolicy policy) {
  wherry::BalanceConfig config = kConfig;
  config.policy = policy;
  std::vector<double> seconds;
  double imbalance = 0;
  for (int repeat = 0; repeat < 5; ++repeat) {
    const auto start = std::chrono::steady_clock::now();
    const auto layers = wherry::balance(loads, config);
    seconds.push_back(
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    imbalance = 0;
    for (const auto& layer : layers) imbalance += layer.imbalance;
  }
  std::sort(seconds.begin(), seconds.end());
  return {seconds[seconds.size() / 2], imbalance / static_cast<double>(loads.size())};
}

Draw zipf(double exponent) {
  return [exponent](std::mt19937_64&, int expert) { return std::pow(expert + 1.0, -exponent); };
}

Draw lognormal(double sigma) {
  return [sigma](std::mt19937_64& random, int) {
    return std::exp(sigma * std::normal_distribution<double>()(random));
  };
}

}  // namespace

int main(int argc, char** argv) {
  int layers = 58;
  if (argc > 1) {
    const char* const end = argv[1] + std::strlen(argv[1]);
    const auto [stop, error] = std::from_chars(argv[1], end, layers);
    if (argc > 2 || error != std::errc() || stop != end || layers < 1) {
      fmt::print(stderr, "usage: placement_bench [layers], at least 1\n");
      return 2;
    }
  }
  const struct {
    const char* name;
    Draw draw;
  } shapes[] = {{"uniform", [](std::mt19937_64& random,
                               int) { return std::uniform_real_distribution<double>()(random); }},
                {"lognormal 1", lognormal(1)},
                {"zipf 1.2", zipf(1.2)},
                {"zipf 1.5", zipf(1.5)},
                {"lognormal 3", lognormal(3)}};
  for (const auto& shape : shapes) {
    const Loads loads = make_loads(layers, shape.draw);
    const Run reference = run(loads, wherry::BalancePolicy::reference);
    const Run best = run(loads, wherry::BalancePolicy::best);
    fmt::print(
        "{{\"bench\": \"placement\", \"loads\": \"{}\", \"layers\": {}, \"experts\": {}, "
        "\"slots\": {}, \"ranks\": {}, \"reference_s\": {:.4f}, \"best_s\": {:.4f}, "
        "\"reference_imbalance\": {:.6f}, \"best_imbalance\": {:.6f}}}\n",
        shape.name, layers, kExperts, kConfig.slots, kConfig.ranks, reference.seconds, best.seconds,
        reference.imbalance, best.imbalance);
  }
  return 0;
}
