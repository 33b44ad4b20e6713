// Starts the ranks of a command and ends them when the user interrupts.
#pragma once

#include <functional>

#include "wherry/group.hpp"

namespace wherry::cli {

struct LaunchOptions {
  int ranks = 4;
  bool threads = false;  // else processes
  double deadline = kDefaultDeadline.count();
};

// Runs fn on every rank. The first error of a rank is thrown here. Ctrl-C or SIGTERM: rank
// processes are ended and Error(interrupted) is thrown; rank threads cannot be ended from outside,
// so the process says the same sentence and exits as it would then. Nothing in this process may have
// started threads before.
void launch(const LaunchOptions& options, const std::function<void(Group&)>& fn);

// Threads for each rank, so that all ranks together use the cores once.
[[nodiscard]] int threads_per_rank(int ranks);

}  // namespace wherry::cli
