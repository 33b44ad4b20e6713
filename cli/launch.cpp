#include "launch.hpp"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <string_view>

#include "command.hpp"
#include "machine.hpp"
#include "support/devices.hpp"

namespace wherry::cli {

namespace {

std::atomic<bool> interrupted{false};
static_assert(std::atomic<bool>::is_always_lock_free, "written by a signal handler");

void note_interrupt(int /*signal*/) { interrupted = true; }

// Only what a signal handler may do.
void exit_interrupted(int /*signal*/) {
  constexpr std::string_view kSentence = "wherry: interrupted; the ranks were ended\n";
  constexpr std::string_view kClearLine = "\r\033[K";
  if (isatty(STDERR_FILENO) != 0 &&
      write(STDERR_FILENO, kClearLine.data(), kClearLine.size()) < 0) {
    _exit(kBadUse);
  }
  _exit(write(STDERR_FILENO, kSentence.data(), kSentence.size()) < 0 ? kFailed : kBadUse);
}

// Handles SIGINT and SIGTERM while it lives.
class Handlers {
 public:
  explicit Handlers(void (*handler)(int)) {
    struct sigaction action{};
    action.sa_handler = handler;
    action.sa_flags = SA_RESTART;
    sigemptyset(&action.sa_mask);
    for (std::size_t i = 0; i < kSignals.size(); ++i) sigaction(kSignals[i], &action, &before_[i]);
  }
  ~Handlers() {
    for (std::size_t i = 0; i < kSignals.size(); ++i) sigaction(kSignals[i], &before_[i], nullptr);
  }
  Handlers(const Handlers&) = delete;
  Handlers& operator=(const Handlers&) = delete;

 private:
  static constexpr std::array kSignals{SIGINT, SIGTERM};
  std::array<struct sigaction, kSignals.size()> before_{};
};

}  // namespace

void launch(const LaunchOptions& options, const std::function<void(Group&)>& fn) {
  const RunOptions run{.deadline = Seconds(options.deadline), .cancelled = &interrupted};
  if (options.threads) {
    const Handlers handlers(exit_interrupted);
    run_threads(options.ranks, fn, run);
  } else {
    const Handlers handlers(note_interrupt);
    run_processes(options.ranks, fn, run);
  }
}

Device device_of(const LaunchOptions& options, const Group& group) {
  if (options.device == Device::Kind::cpu) return Device::cpu();
  const auto gpus = static_cast<int>(find_devices().found.size());
  return Device::cuda(gpus == 0 ? 0 : group.rank() % gpus);
}

int threads_per_rank(int ranks) { return std::max(1, num_cores() / ranks); }

}  // namespace wherry::cli
