// The k best of a sequence by insertion: one comparison for most candidates, no full sort.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace wherry {

// Best first. Offer candidates in ascending id: of equal values the earlier stays ahead. Reused
// from token to token without allocating.
class Best {
 public:
  explicit Best(int k) : values_(static_cast<std::size_t>(k)), ids_(static_cast<std::size_t>(k)) {}

  void clear() noexcept { size_ = 0; }

  void offer(float value, std::int32_t id) noexcept {
    if (size_ == values_.size()) {
      if (!(value > values_.back())) return;
    } else {
      ++size_;  // the first k stay whatever their value, -inf too
    }
    std::size_t at = size_ - 1;
    for (; at > 0 && values_[at - 1] < value; --at) {
      values_[at] = values_[at - 1];
      ids_[at] = ids_[at - 1];
    }
    values_[at] = value;
    ids_[at] = id;
  }

  [[nodiscard]] std::span<const std::int32_t> ids() const noexcept {
    return std::span(ids_).first(size_);
  }

 private:
  std::vector<float> values_;
  std::vector<std::int32_t> ids_;
  std::size_t size_ = 0;
};

}  // namespace wherry
