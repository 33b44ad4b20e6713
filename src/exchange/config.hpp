// What a configuration means in rows: the capacities from which layout.hpp builds the window.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/layout.hpp"
#include "kernels/stages.hpp"
#include "wherry/exchange.hpp"

namespace wherry {

struct Capacity {
  std::int64_t limit = 0;  // rows (grouped) or token rows (tokens) a rank accepts, without padding
  std::int64_t rows_per_slot = 0;  // slots
  std::int64_t token_rows = 0;     // received token rows, 0 where nobody needs them
  layout::WindowParams params;
};

// Where exchanges that share a window lie in it: headers, signals and counts of each behind those of the
// one before; then come the rows, which all share.
struct SharedLayout {
  struct Place {
    std::uint64_t begin = 0;       // of its header
    std::uint64_t rows_begin = 0;  // of its rows, counted from its header
  };
  std::vector<Place> places;
  std::uint64_t bytes = 0;  // of the window
};
[[nodiscard]] SharedLayout share_window(std::span<const layout::WindowParams> exchanges);

// Throws bad_argument naming the field, its value and what is allowed.
void check_config(const ExchangeConfig& config, int rank, int ranks);
[[nodiscard]] Placement placement_of(const ExchangeConfig& config, int ranks);
[[nodiscard]] Capacity capacity_of(const ExchangeConfig& config, const Placement& placement);
// Collective. Every rank sees every configuration and compares with rank 0's, so all find the same
// difference. Throws bad_argument, config_mismatch.
void agree(const Group& group, Device device, const ExchangeConfig& config);
// Tells placements with the same slots apart by the experts in them.
[[nodiscard]] std::uint64_t hash_of(const Placement& placement) noexcept;
// Throws bad_argument unless `placement` can take the place of `old`.
void check_switch(const Placement& placement, const Placement& old, int rank);
[[nodiscard]] kernels::Mode mode_of(const ExchangeConfig& config);

}  // namespace wherry
