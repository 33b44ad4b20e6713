// The launchers' ranks and the host's processors: each rank gets its share, in the order of the
// machine's topology, so that neighbours in rank are neighbours in cores and NUMA nodes; its memory
// comes from there by first touch.
#pragma once

#include <string>
#include <vector>

namespace wherry {

// The part of `cpus` that rank `rank` of `ranks` gets; more ranks than processors share them.
[[nodiscard]] std::vector<int> share_of_cpus(const std::vector<int>& cpus, int rank, int ranks);

// Processors this thread may use, in the order of the machine's topology. `synthetic`: all of a
// made-up machine, for tests ("numa:2 core:4 pu:1"); needs hwloc.
[[nodiscard]] std::vector<int> usable_cpus(const std::string& synthetic = "");

// Binds the calling thread, and those it will start, to its rank's share; asks the scheduler not to
// preempt others when it wakes (SCHED_BATCH); and makes its waits those of a bound thread
// (support/doorbell.hpp). Returns which ranks have the same one processor, [ranks]: what they do they
// do while this one sleeps. Empty if the thread was not bound.
// Measured with 8 ranks on 2 cores, 16 tokens a rank: bound ranks that sleep 1.2 ms and 0.03
// involuntary switches a step, unbound ranks that yield first 1.1 ms and 20, unbound ranks that
// sleep 1.8 ms and 3.5. With 4 x 512 tokens: 6.4, 7.3 and 8.7 ms. Not spinning for ranks beside, and
// 1000 instead of 100 turns for others: decode over 4 ranks 450 -> 435 us (0 and 100: 460 and 474;
// 5000: 490). A system that refuses leaves the thread as it is.
std::vector<bool> bind_rank(int rank, int ranks);

}  // namespace wherry
