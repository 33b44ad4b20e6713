// One measurement of plan, dispatch and combine: correct first, then timed, with its floor.
//
// How time is taken: all ranks meet, then plan and dispatch; they meet, the experts run untimed; they
// meet, then combine. Each part counts from the first rank that begins to the last that has finished,
// on the clock that all processes of a host share, so the meetings themselves are not in it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "wherry/exchange.hpp"
#include "wherry/group.hpp"
#include "workload.hpp"

namespace wherry::bench {

struct Job {
  Shape shape;
  bool processes = true;
  Layout layout = Layout::grouped;
  std::optional<Reduction> reduction = std::nullopt;
  Experts experts = Experts::identity;
  int depth = 1;
  bool halves =
      false;  // `depth` dispatches in flight at once, then their combines; time is a share
  std::int64_t rows_per_slot = 0;
  std::int64_t receive_rows = 0;
  int alignment = 1;
  std::string kernels = {};
  int threads_per_rank = 1;
  int steps = 30;
  int warmup = 5;

  [[nodiscard]] ExchangeConfig config() const;
};

// Microseconds of one quantity over all timed steps; in each the slowest rank counts.
struct Spread {
  double p50 = 0;
  double p99 = 0;
  double min = 0;
};
[[nodiscard]] Spread spread_of(std::vector<double> microseconds);

struct Report {
  std::string kernels, fabric, reduction;
  Spread plan, dispatch_send, dispatch_recv, dispatch, experts, combine_send, combine_recv, combine,
      total;
  Spread floor;                 // of the faster kind of stores
  std::string floor_with;       // which kind that was
  double copy_gbps = 0;         // read and written by all ranks at the floor
  std::int64_t bytes = 0;       // payload of all ranks in a step, dispatch and combine
  std::int64_t link_bytes = 0;  // of them to or from another rank
  std::uint64_t window_bytes = 0;
  double involuntary_switches = 0;  // a step and rank, inside the timed parts
  double worst_switches = 0;        // of the rank that had most
};

// Collective; every rank gets the same report. Throws what the exchange throws, and internal naming
// the first wrong element if a result is not bit for bit that of the dense reference.
[[nodiscard]] Report measure(const Group& group, const Job& job);

}  // namespace wherry::bench
