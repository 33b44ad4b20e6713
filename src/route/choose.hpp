// Group-limited top-k.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "route/best.hpp"
#include "wherry/router.hpp"

namespace wherry {

// Chooses the experts of one token after the other; owns the scratch memory for that.
class Chooser {
 public:
  explicit Chooser(const RouterConfig& config);

  // ids [topk], best first. `max` is the checked_max() of logits [experts].
  void choose(std::span<const float> logits, float max, std::span<const float> bias,
              std::span<std::int32_t> ids);

 private:
  void set_values(std::span<const float> logits, float max, std::span<const float> bias);
  void keep_groups();
  void offer(std::size_t begin, std::size_t end);

  const RouterConfig& config_;
  std::size_t group_size_;
  std::vector<double> scores_;      // [experts]
  std::vector<float> values_;       // what is compared, [experts]
  std::vector<std::uint8_t> kept_;  // [groups]
  Best best_groups_;
  Best best_;
};

}  // namespace wherry
