// The file of a run of gpu_bench: its figures, one a line, and what it ran on.
#pragma once

#include <string>
#include <vector>

#include "oracle.hpp"
#include "replays.hpp"

namespace wherry::bench {

// Lines are added by rank 0 of whichever process, to a file beside the one at `path`.
class Results {
 public:
  // Empties it. `command` is told along.
  Results(std::string path, std::string command);
  // Puts the lines together, with what WHERRY_MACHINE, _DRIVER, _NVCC, _COMPILER and _COMMIT say.
  void finish() const;

  // The link's own figures; percentages are of its best copy by a kernel that runs both ways at once.
  // In a process of its own: this one must not touch CUDA before it forks.
  void measure_the_link();
  [[nodiscard]] double link_gbps() const { return link_gbps_; }

  struct Row {
    RanksAs ranks_as;
    const GpuShape& shape;
    const std::string& kernels;  // that ran
    const char* stage;
    const std::vector<float>& us;  // of all replays; none: no row
    double bytes;  // the fewest: each input read once, each output written once; or over the link
    double gbps;   // at which they could move
  };
  void add(const Row& row) const;

 private:
  [[nodiscard]] std::string rows_path() const { return path_ + ".rows"; }
  void add_link() const;

  std::string path_;
  std::string command_;
  double link_gbps_ = 0.0;
};

}  // namespace wherry::bench
