// Compares the results of a layer with the dense reference, each rank some of its own tokens.
#pragma once

#include <cstdint>
#include <vector>

#include "experts/reference.hpp"
#include "wherry/format.hpp"
#include "wherry/types.hpp"

namespace wherry::cli {

// The tokens of one rank to verify, ascending: all while the reference of all ranks' tokens costs
// less than 20 GFLOP, else about 64 / ranks spread evenly, the first and the last among them.
[[nodiscard]] std::vector<std::int64_t> tokens_to_verify(int ranks, int rank, std::int64_t tokens,
                                                         double flop_of_all);

struct LocalVerification {
  std::int64_t tokens = 0;
  double max_error = 0.0, tolerance = 0.0;
  bool passed = false;
  std::int64_t worst_token = -1, worst_column = -1;  // worst_token of this rank
};

// How far a correct layer may be from the reference because results went home in `wire`, as
// compare() measures it; 0 for wires that change nothing. verify.cpp derives it.
[[nodiscard]] double wire_tolerance(const WireFormat& wire, int topk);

// Verifies the rows `chosen` of x, as the experts got it, and of y [tokens, hidden], whose terms came
// home in combine_wire. Local.
[[nodiscard]] LocalVerification verify_tokens(const SyntheticExperts& experts,
                                              const std::vector<std::int64_t>& chosen,
                                              ConstTensorView x, const Routing& routing,
                                              ConstTensorView y, const WireFormat& combine_wire,
                                              int num_threads);

}  // namespace wherry::cli
