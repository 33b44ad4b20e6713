// One measurement of plan, dispatch and combine: correct first, then timed, with its floor.
//
// How time is taken: all ranks meet, then plan and dispatch; they meet, the experts run untimed; they
// meet, then combine. Each part counts from the first rank that begins to the last that has finished,
// on the clock that all processes of a host share, so the meetings themselves are not in it.
#pragma once

#include <cstdint>
#include <functional>
#include <string_view>
#include <vector>

#include "stream.hpp"
#include "wherry/exchange.hpp"
#include "wherry/group.hpp"
#include "workload.hpp"

namespace wherry::bench {

struct Job {
  Shape shape;            // shape.tokens is config.max_tokens; likewise hidden, topk, experts
  ExchangeConfig config;  // complete
  bool processes = true;  // how the ranks were started
  Experts experts = Experts::identity;  // of the timed steps
  bool halves =
      false;  // `depth` dispatches in flight at once, then their combines; time is a share
  int steps = 30;
  int warmup = 5;
};

// Microseconds of one quantity over all timed steps; in each the slowest rank counts.
struct Spread {
  double p50 = 0;
  double p99 = 0;
  double min = 0;
};
[[nodiscard]] Spread spread_of(std::vector<double> microseconds);

// Plain data, so that it can lie in memory that ranks share with their launcher.
struct Report {
  Spread plan, dispatch_send, dispatch_recv, dispatch, experts, combine_send, combine_recv, combine,
      total;
  Spread floor;                           // with the faster kind of stores
  Stores floor_with = Stores::streaming;  // which kind that was
  double copy_gbps = 0;                   // read and written by all ranks at the floor
  std::int64_t bytes = 0;                 // payload of all ranks in a step, dispatch and combine
  std::int64_t link_bytes = 0;            // of them to or from another rank
  double wire_error = 0;  // rms of what the number formats change in the outputs, over their rms
  std::uint64_t window_bytes = 0;
  double involuntary_switches = 0;  // a step and rank, inside the timed parts
  double worst_switches = 0;        // of the rank that had most
  char kernels[32] = {}, fabric[32] = {};
};

// Says what a long measurement is doing; called by rank 0, never inside a timed part.
using Progress = std::function<void(std::string_view)>;

// Collective; every rank gets the same report. Throws what the exchange throws, and internal naming
// the first wrong element if a result is not bit for bit that of the dense reference.
[[nodiscard]] Report measure(const Group& group, const Job& job, const Progress& progress);

}  // namespace wherry::bench
