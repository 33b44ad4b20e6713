#include "route/choose.hpp"

#include <algorithm>
#include <limits>

#include "route/scores.hpp"

namespace wherry {
namespace {

// The sum of the two largest values; of a group of one, that value.
float top_two(std::span<const float> group) {
  if (group.size() == 1) return group[0];
  float first = -std::numeric_limits<float>::infinity();
  float second = first;
  for (const float value : group) {
    second = std::max(second, std::min(first, value));
    first = std::max(first, value);
  }
  return first + second;
}

}  // namespace

Chooser::Chooser(const RouterConfig& config)
    : config_(config),
      group_size_(static_cast<std::size_t>(config.experts / config.groups)),
      scores_(static_cast<std::size_t>(config.experts)),
      values_(static_cast<std::size_t>(config.experts)),
      kept_(static_cast<std::size_t>(config.groups)),
      best_groups_(config.groups_kept),
      best_(config.topk) {}

void Chooser::choose(std::span<const float> logits, float max, std::span<const float> bias,
                     std::span<std::int32_t> ids) {
  set_values(logits, max, bias);
  best_.clear();
  if (config_.groups_kept == config_.groups) {
    offer(0, values_.size());
  } else {
    // Leaving out the experts of a dropped group is what masking them with -inf means:
    // RouterConfig::check() has made sure that the kept groups hold topk experts.
    keep_groups();
    for (std::size_t g = 0; g < kept_.size(); ++g) {
      if (kept_[g] != 0) offer(g * group_size_, (g + 1) * group_size_);
    }
  }
  std::ranges::copy(best_.ids(), ids.begin());
}

// Every score grows with its logit, so without a bias and groups the logits choose: cheaper, and
// large logits stay apart where their scores round to the same fp32 (Llama-4 and gpt-oss choose so).
void Chooser::set_values(std::span<const float> logits, float max, std::span<const float> bias) {
  if (config_.score == Score::topk_softmax ||
      (bias.empty() && config_.groups_kept == config_.groups)) {
    std::ranges::copy(logits, values_.begin());
  } else {
    score_all(config_.score, logits, max, scores_);
    for (std::size_t i = 0; i < values_.size(); ++i) values_[i] = static_cast<float>(scores_[i]);
  }
  for (std::size_t i = 0; i < bias.size(); ++i) values_[i] += bias[i];
}

void Chooser::keep_groups() {
  best_groups_.clear();
  for (std::size_t g = 0; g < kept_.size(); ++g) {
    const auto group = std::span<const float>(values_).subspan(g * group_size_, group_size_);
    best_groups_.offer(top_two(group), static_cast<std::int32_t>(g));
  }
  std::ranges::fill(kept_, std::uint8_t{0});
  for (const std::int32_t g : best_groups_.ids()) kept_[static_cast<std::size_t>(g)] = 1;
}

void Chooser::offer(std::size_t begin, std::size_t end) {
  for (std::size_t i = begin; i < end; ++i) best_.offer(values_[i], static_cast<std::int32_t>(i));
}

}  // namespace wherry
