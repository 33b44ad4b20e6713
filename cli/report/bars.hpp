// A histogram in one line of text.
#pragma once

#include <cstdint>
#include <span>
#include <string>

namespace wherry::cli {

// One character a bar, its height the value's share of the largest, in eighths ("▁" to "█", a blank
// for 0). More values than `width` are put together, neighbours in order: a bar is their largest.
[[nodiscard]] std::string bars_text(std::span<const std::int64_t> values, int width = 64);

}  // namespace wherry::cli
