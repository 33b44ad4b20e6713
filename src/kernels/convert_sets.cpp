// Which conversion kernels there are, and how one is chosen: by the same names as the other stages.
#include <algorithm>
#include <vector>

#include "kernels/convert.hpp"
#include "kernels/stages.hpp"

namespace wherry::kernels {

std::span<const ConvertSet> convert_sets() {
  static const std::vector<ConvertSet> sets = [] {
    std::vector<ConvertSet> all = cpu::convert_sets();
    all.push_back({"reference", reference::quantize_row, reference::dequantize_row});
    return all;
  }();
  return sets;
}

const ConvertSet& find_convert(std::string_view name) {
  const std::string_view wanted = find(name).name;
  const std::span<const ConvertSet> sets = convert_sets();
  const auto found = std::ranges::find(sets, wanted, &ConvertSet::name);
  return found != sets.end() ? *found : sets.back();
}

}  // namespace wherry::kernels
