#include "report/bars.hpp"

#include <algorithm>

namespace wherry::cli {

std::string bars_text(std::span<const std::int64_t> values, int width) {
  constexpr const char* kEighths[] = {" ", "▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"};
  if (values.empty()) return {};
  const std::size_t bars = std::min(values.size(), static_cast<std::size_t>(width));
  const std::int64_t most = std::max<std::int64_t>(1, *std::ranges::max_element(values));
  std::string text;
  for (std::size_t bar = 0; bar < bars; ++bar) {
    const std::size_t begin = bar * values.size() / bars;
    const std::size_t end = (bar + 1) * values.size() / bars;
    const std::int64_t value = *std::ranges::max_element(values.subspan(begin, end - begin));
    text += kEighths[(value * 8 + most - 1) / most];  // what is not 0 is seen
  }
  return text;
}

}  // namespace wherry::cli
