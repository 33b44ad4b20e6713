// What stands between dispatch and combine in a benchmark: its time is never part of the exchange's.
#pragma once

#include "wherry/exchange.hpp"
#include "workload.hpp"

namespace wherry::bench {

// Writes the result row of every received row to `results` (combine_input()). In layout `tokens`
// that is the weighted sum which its caller owes.
void run_experts(const Exchange& exchange, const Received& received, Experts experts,
                 const TensorView& results);

}  // namespace wherry::bench
