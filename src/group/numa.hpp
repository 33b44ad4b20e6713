// Ranks of one host and its NUMA nodes: rank r computes on its share of the nodes, and its memory
// comes from there by first touch. Does nothing on a machine with one node.
#pragma once

#include <string>
#include <vector>

namespace wherry {

// The nodes (by index) that rank `rank` of `ranks` gets out of `nodes`: neighbours in rank are
// neighbours in nodes; with more ranks than nodes several share one.
[[nodiscard]] std::vector<int> nodes_of_rank(int rank, int ranks, int nodes);

// Binds the calling thread, and those it will start, to its rank's nodes. Throws nothing: a system
// that refuses leaves the thread where it is. `topology`: a synthetic one for tests ("numa:2 pu:4"),
// or empty for this machine. Returns the processors it chose, empty if there is nothing to choose.
std::vector<int> bind_rank(int rank, int ranks, const std::string& topology = "");

}  // namespace wherry
