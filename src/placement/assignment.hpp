// The cheapest one-to-one assignment. Internal.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace wherry {

// cost is square, [n, n]; returns the column of each row such that the sum of the costs is least.
// O(n^3), by shortest augmenting paths (Kuhn, Munkres; Jonker and Volgenant).
[[nodiscard]] std::vector<std::size_t> cheapest_assignment(std::span<const std::int64_t> cost,
                                                           std::size_t n);

}  // namespace wherry
