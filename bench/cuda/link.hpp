// What the link between two GPUs can do by itself: copies by kernels of few blocks, each way of moving
// bytes, and a word that goes to the other GPU and back.
#pragma once

#include <string>
#include <vector>

namespace wherry::bench {

// One process drives both GPUs, ordinals 0 and 1. Needs two that can address each other.
struct LinkRate {
  // "bulk store", "16-byte store", "bulk load", "16-byte load", "engine";
  // "bulk store at home": within one GPU, what a multiprocessor can write at all;
  // "bulk store there and at home": what is read once and written to both, counted once.
  std::string how;
  int blocks;        // of 512 threads; engine: 0
  double one_way;    // GB/s of GPU 0 alone
  double both_ways;  // GB/s of each while both send
};
[[nodiscard]] std::vector<LinkRate> measure_link();
// GB/s both ways of the best copy over the link by a kernel: what percentages are of.
[[nodiscard]] double best_copy(const std::vector<LinkRate>& rates);

// Microseconds there and back of a word that both GPUs poll for.
struct RoundTrip {
  double relaxed;
  double ordered;  // with a fence before each store, and acquiring loads
};
[[nodiscard]] RoundTrip measure_round_trip();

}  // namespace wherry::bench
