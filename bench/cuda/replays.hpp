// How long the stages of a step take: whole steps in a graph that is replayed, read by events and by kernels
// that stamp the clock.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>
#include <vector>

#include "meeting.hpp"

namespace wherry::bench {

enum class RanksAs { processes, threads, gpus };
[[nodiscard]] const char* name(RanksAs ranks_as);

[[nodiscard]] float median(std::vector<float> values);

// Of the current device: bytes read plus bytes written, GB/s, of a large copy.
[[nodiscard]] double copy_rate();

// Microseconds of a step, or of its first and second part, one a replay.
struct Times {
  std::vector<float> whole, first, second;
};
using Calls = std::function<void()>;

class Replays {
 public:
  Replays(RanksAs ranks_as, int rank, Meeting& meeting, cudaStream_t stream)
      : ranks_as_(ranks_as),
        rank_(rank),
        meeting_(meeting),
        stream_(stream) {}

  // A graph of `steps` steps, each `first` and then `second`, replayed. Where the ranks launch together
  // one of them captures and replays what all have called; the others get no times.
  Times time(int steps, int replays, bool apart, const Calls& first, const Calls& second);

 private:
  RanksAs ranks_as_;
  int rank_;
  Meeting& meeting_;
  cudaStream_t stream_;
};

}  // namespace wherry::bench
