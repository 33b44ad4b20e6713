// The ranks of one expert-parallel group, and how to start them. A group needs only a rank, a size
// and an allgather of bytes; windows, connections and agreement are built from that.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace wherry {

class Fabric;

namespace detail {
struct GroupState;
}

using Seconds = std::chrono::duration<double>;
inline constexpr Seconds kDefaultDeadline{100.0};

// Copyable handle; all copies are the same group. One thread uses a group at a time.
class Group {
 public:
  using Bytes = std::vector<std::byte>;
  // Gathers `mine` of every rank, indexed by rank. Sizes may differ. Called collectively.
  using AllgatherFn = std::function<std::vector<Bytes>(std::span<const std::byte> mine)>;

  // Ranks that a launcher has started: rank and size from WHERRY_RANK/WHERRY_SIZE, or what torchrun
  // (RANK, WORLD_SIZE), Open MPI, MPICH or Slurm set, whichever comes first. They meet over TCP at
  // MASTER_ADDR and port WHERRY_PORT (default MASTER_PORT + 1), or without MASTER_ADDR, on one host,
  // at a Unix socket named after the job. Collective, blocking; further calls make further groups of
  // the same ranks. Throws bad_argument (naming the variable), timeout naming the ranks that did not
  // come within `deadline`, config_mismatch, peer_failed, system.
  [[nodiscard]] static Group from_environment(Seconds deadline = kDefaultDeadline);

  // Bring your own transport (torch.distributed, mpi4py). Ranks of one process become threads of a
  // shared address space, ranks of one host share memory; which, is found out by the first
  // exchange. Throws bad_argument.
  [[nodiscard]] static Group from_allgather(int rank, int size, AllgatherFn allgather);

  [[nodiscard]] int rank() const noexcept;
  [[nodiscard]] int size() const noexcept;

  // Collective, blocking. Throws timeout or peer_failed naming the missing rank.
  [[nodiscard]] std::vector<Bytes> allgather(std::span<const std::byte> mine) const;
  // Collective, blocking: returns when every rank has entered.
  void barrier() const;

  // The group of `ranks` (of this one, this rank among them): ranks[i] becomes rank i. Collective over
  // those only, so that survivors can go on without the dead; this group may have failed, and stays
  // as it is. Every rank of it makes the same subgroups in the same order. Throws bad_argument,
  // unsupported (ranks on several hosts, or a group by from_allgather: make the smaller one the same
  // way), timeout naming, by their rank in the subgroup, who did not come within `deadline`.
  [[nodiscard]] Group subgroup(std::span<const int> ranks,
                               Seconds deadline = kDefaultDeadline) const;

  explicit Group(std::shared_ptr<detail::GroupState> state) : state_(std::move(state)) {}
  [[nodiscard]] detail::GroupState& state() const noexcept { return *state_; }

 private:
  std::shared_ptr<detail::GroupState> state_;
};

struct RunOptions {
  Seconds deadline = kDefaultDeadline;           // of every collective of the group itself
  const std::atomic<bool>* cancelled = nullptr;  // when it turns true, ranks are ended
};

// Both launchers bind each rank to its share of the processors this process may use (taskset and
// cgroups say which), in the order of the machine's topology.
//
// Runs fn on n ranks as threads of this process and returns when all have ended. If ranks throw,
// the exception that came first is rethrown; the others' waits end early.
void run_threads(int ranks, const std::function<void(Group&)>& fn, const RunOptions& options = {});

// Runs fn on n ranks as forked processes and returns when all have ended. The children die with
// this process (also on SIGKILL) and leave nothing behind. Must be called before this process has
// started threads or used an OpenMP library: a child inherits only the calling thread. An exception
// or a death in a child is rethrown here: the exception that came first; a rank killed by a signal
// is peer_failed naming it. Ranks that have not ended `deadline` + 1 s after the first failure are
// killed. If `cancelled` turns true, the children are killed and
// ErrorCode::interrupted is thrown.
void run_processes(int ranks, const std::function<void(Group&)>& fn,
                   const RunOptions& options = {});

}  // namespace wherry
