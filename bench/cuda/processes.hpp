// One process a rank, forked before anything touches CUDA, with a page of shared memory between
// them: a barrier, the IPC handles of the windows, and numbers for the parent. A rank that fails
// ends all of them. Where there are several GPUs, ranks take them in turns.
#pragma once

#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <new>
#include <vector>

#include "cluster.hpp"

namespace wherry::bench {

inline constexpr int kMaxProcesses = 16;
inline constexpr int kMaxSamples = 64;
enum TimedStage : int { kDispatch, kCombine, kCombineOther, kBoth, kPlanDispatch, kNumStages };

struct SharedPage {
  int ranks = 0;
  std::atomic<int> arrived{0};
  std::atomic<int> phase{0};
  cudaIpcMemHandle_t handles[kMaxProcesses] = {};
  float samples[kMaxProcesses][kNumStages][kMaxSamples] = {};  // us
  double copy_gbps = 0.0;                                      // read and written in one GPU
  double peer_gbps = 0.0;                                      // sent to another GPU

  void barrier() {
    const int mine = phase.load();
    if (arrived.fetch_add(1) + 1 == ranks) {
      arrived.store(0);
      phase.store(mine + 1);
      return;
    }
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(90);
    while (phase.load() == mine) {
      sched_yield();
      if (std::chrono::steady_clock::now() < deadline) continue;
      std::fprintf(stderr, "a rank did not come to the barrier\n");
      std::exit(1);
    }
  }
  GatherHandles gather(int rank) {
    return [this, rank](const cudaIpcMemHandle_t& mine) {
      handles[rank] = mine;
      barrier();
      return std::vector<cudaIpcMemHandle_t>(handles, handles + ranks);
    };
  }
};

// Runs body(rank, page) in `ranks` forked processes, then report(page) here. False if one failed.
inline bool run_processes(int ranks, const std::function<int(int, SharedPage&)>& body,
                          const std::function<void(const SharedPage&)>& report) {
  void* memory =
      mmap(nullptr, sizeof(SharedPage), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return false;
  auto* page = new (memory) SharedPage;
  page->ranks = ranks;
  std::fflush(nullptr);
  std::vector<pid_t> children;
  for (int rank = 0; rank < ranks; ++rank) {
    const pid_t child = fork();
    if (child == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      int devices = 1;
      if (cudaGetDeviceCount(&devices) == cudaSuccess) cudaSetDevice(rank % devices);
      const int status = body(rank, *page);
      std::fflush(nullptr);
      _exit(status);
    }
    children.push_back(child);
  }
  bool good = true;
  for (std::size_t left = children.size(); left > 0; --left) {
    int status = 0;
    if (waitpid(-1, &status, 0) < 0) break;
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0) continue;
    if (good) {
      for (const pid_t child : children) kill(child, SIGTERM);
    }
    good = false;
  }
  if (good) report(*page);
  munmap(memory, sizeof(SharedPage));
  return good;
}

}  // namespace wherry::bench
