// Starts the ranks of a command and ends them when the user interrupts.
#pragma once

#include <functional>

#include "wherry/group.hpp"
#include "wherry/types.hpp"

namespace wherry::cli {

struct LaunchOptions {
  int ranks = 4;
  bool threads = false;  // else processes
  double deadline = kDefaultDeadline.count();
  Device::Kind device = Device::Kind::cpu;
};

// Runs fn on every rank. The first error of a rank is thrown here. Ctrl-C or SIGTERM: rank
// processes are ended and Error(interrupted) is thrown; rank threads cannot be ended from outside,
// so the process says the same sentence and exits as it would then. Nothing in this process may have
// started threads before.
void launch(const LaunchOptions& options, const std::function<void(Group&)>& fn);

// Where a rank has its rows: GPUs are dealt out in turn, so that ranks share one where there are fewer.
// Called by the rank: its launcher must not start CUDA.
[[nodiscard]] Device device_of(const LaunchOptions& options, const Group& group);

// Threads for each rank, so that all ranks together use the cores once.
[[nodiscard]] int threads_per_rank(int ranks);

}  // namespace wherry::cli
