// How the stages of the ranks of one process on one GPU get there. Kernels of different ranks wait for
// each other, and two streams may share a hardware queue, where one kernel would stand in front of the
// one that it waits for. So the ranks of a process launch together: each brings its arguments, and the
// last to come launches one grid for all. A rank alone in its process launches at once.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <functional>
#include <mutex>
#include <type_traits>
#include <typeinfo>
#include <vector>

#include "kernels/cuda/args.hpp"
#include "support/cuda.hpp"
#include "wherry/group.hpp"

namespace wherry::cuda {

class Launches {
 public:
  // `ranks`: those of this process on this device, ascending; at most kMaxRanksPerLaunch.
  Launches(std::vector<int> ranks, Seconds deadline);

  [[nodiscard]] int num_ranks() const noexcept { return static_cast<int>(ranks_.size()); }

  // Called by each of the ranks; `local` is its place among them. launch(table, ranks, stream) is called
  // by one of them. `done`, or null, is recorded behind it. Throws misuse where the ranks make different
  // calls or use different streams, timeout naming a rank that does not come, system.
  template <typename Args, typename Launch>
  void launch(int local, const Args& mine, cudaStream_t stream, Error::Where where,
              const Launch& launch, cudaEvent_t done = nullptr) {
    static_assert(std::is_trivially_copyable_v<Args>);
    using Table = kernels::cuda::RankTable<Args>;
    const auto launch_table = [&](std::byte* table) {
      return launch(*reinterpret_cast<Table*>(table), num_ranks(), stream);
    };
    if (num_ranks() == 1) {
      Table table{};
      table.rank[0] = mine;
      check(launch(table, 1, stream), where, "launch");
      check(record_beside(stream, {&done, 1}), where, "cudaEventRecord");
      return;
    }
    together({local, typeid(Args).hash_code(), sizeof(Args), sizeof(Table), &mine, stream, done},
             where, launch_table);
  }

 private:
  struct Call {
    int local;
    std::size_t kind;
    std::size_t args_bytes;
    std::size_t table_bytes;
    const void* args;
    cudaStream_t stream;
    cudaEvent_t done;
  };
  void together(const Call& call, Error::Where where,
                const std::function<cudaError_t(std::byte*)>& launch);

  std::vector<int> ranks_;
  Seconds deadline_;
  std::mutex mutex_;
  std::condition_variable launched_;
  std::vector<std::byte> table_;
  std::vector<bool> here_;         // [ranks] have come to this turn
  std::vector<cudaEvent_t> done_;  // [ranks] of this turn
  int arrived_ = 0;
  std::uint64_t turns_ = 0;
  std::size_t kind_ = 0;
  cudaStream_t stream_ = nullptr;
  cudaError_t result_ = cudaSuccess;
  int missing_ = -1;  // the rank that did not come: nothing is launched any more
  bool differs_ = false;
};

}  // namespace wherry::cuda
