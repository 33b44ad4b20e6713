// One shape on GPUs: checked, timed as whole steps in a graph that is replayed, and checked again.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "oracle.hpp"
#include "replays.hpp"
#include "wherry/group.hpp"

namespace wherry::bench {

struct StageTime {
  const char* stage;
  std::vector<float> us;  // of the slowest rank, replay by replay, each the mean of its steps
  double bytes;  // the fewest: each input read once, each output written once; or over the link
};
struct ShapeTimes {
  double gbps = 0;  // at which these bytes could move: of a large copy on the GPU, or the link's
  std::vector<StageTime>
      stages;  // dispatch, combine, step, plan_dispatch, planned_step, "plan, dispatch"
  std::string kernels, fabric;
  std::uint64_t window_bytes = 0;  // of each rank
  int num_sms = 0;                 // of each rank
  int steps = 0;                   // of a replay
};

// Starts the ranks: run_threads, run_processes or what else calls a function on each. Not where CUDA has been
// started in this process and ranks are processes.
using StartRanks = std::function<void(const std::function<void(Group&)>&)>;

// link_gbps: of RanksAs::gpus, whose ranks take the GPUs in turn; others share the first. `report` is called
// on rank 0, in its process. Throws what the exchange throws, and std::runtime_error naming the first element
// that is wrong.
void time_shape(RanksAs ranks_as, const GpuShape& shape, double link_gbps, int replays,
                const StartRanks& start, const std::function<void(const ShapeTimes&)>& report);

}  // namespace wherry::bench
