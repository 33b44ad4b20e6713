// The ranks of one process on one GPU: windows, device memory, and the calls of a step. Used with
// all ranks in one process (one launch serves them all) and with one rank a process (windows are
// opened through CUDA IPC).
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

#include "kernels/cuda/launch.hpp"
#include "oracle.hpp"

namespace wherry::bench {

inline void check_cuda(cudaError_t error, const char* what, const char* file, int line) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s:%d: %s: %s\n", file, line, what, cudaGetErrorString(error));
  std::exit(1);
}
#define CUDA_OK(call) ::wherry::bench::check_cuda((call), #call, __FILE__, __LINE__)

// Gathers the IPC handles of all ranks' windows, indexed by rank; absent: all ranks are local.
using GatherHandles =
    std::function<std::vector<cudaIpcMemHandle_t>(const cudaIpcMemHandle_t& mine)>;

struct Options {
  Shape shape;
  int first_rank = 0;
  int local_ranks = 0;  // 0: all
  GatherHandles gather = {};
  double deadline_s = 20.0;
};

// A mismatch that a check found; counts are since construction.
struct Mismatches {
  unsigned long long rows = 0, entries = 0, sums = 0;
  int first[6] = {};  // kind, rank, row or token, column, expected bits, found bits
};

class Cluster {
 public:
  explicit Cluster(const Options& options);
  ~Cluster();
  Cluster(const Cluster&) = delete;
  Cluster& operator=(const Cluster&) = delete;

  [[nodiscard]] const Shape& shape() const { return shape_; }
  [[nodiscard]] cudaStream_t stream() const { return stream_; }
  [[nodiscard]] const layout::WindowLayout& layout() const { return layout_; }
  [[nodiscard]] const std::vector<std::vector<RankPlan>>& plans() const { return plans_; }
  // Rows that leave all ranks of the group in one dispatch of `set`, with Rows as configured.
  [[nodiscard]] std::int64_t rows_sent(int set) const;
  [[nodiscard]] std::int64_t tokens() const;

  // Makes the routing and the payload of `set` current. Stream-ordered, as all below.
  void load_set(int set);
  void plan(int generation, kernels::cuda::CountStep step = kernels::cuda::CountStep::both);
  void dispatch_send(int generation, bool receive = false);
  void dispatch_recv(int generation);
  // dispatch in as few launches as the shape allows.
  void dispatch(int generation);
  // plan and dispatch, in one launch where the shape allows it.
  void plan_dispatch(int generation);
  void combine_send(int generation);
  void combine_recv(int generation, bool send = false);
  void combine(int generation);
  // Compares received rows and entries with the oracle and writes the results.
  void experts(int generation, int set);
  void check_sums(int set);
  void delay(int step, int most_us);  // a different time on each rank: one rank a process only

  // Waiting for the stream:
  [[nodiscard]] Mismatches mismatches();
  [[nodiscard]] bool plan_is_right(int generation, int set);
  [[nodiscard]] bool sums_are_right_on_host(int set);
  [[nodiscard]] bool sums_are_nan();  // after a combine of poisoned results, no choice absent
  [[nodiscard]] layout::Fault fault(int local) const;
  void poison_windows();  // NaN wherever rows, results, entries and partials go; and in out

  // Tuning; the default is what launch.hpp chooses.
  kernels::cuda::DispatchShape dispatch_shape;
  kernels::cuda::CombineShape combine_shape;
  kernels::cuda::PlanDispatchShape fused_shape;
  int launch_ranks = 0;  // fewer than local: the others do not take part (to test time-outs)

 private:
  struct Local;
  template <typename T>
  T* device(std::size_t count, int fill = 0);
  template <typename T>
  T* upload(const std::vector<T>& values);
  [[nodiscard]] kernels::cuda::CountArgs count_args(const Local& local, int generation,
                                                    int chunk_tokens) const;
  [[nodiscard]] kernels::cuda::Outgoing outgoing(const Local& local, int generation,
                                                 bool receive) const;
  void make_windows(const Options& options);
  void make_local(Local& local, int rank, double deadline_s);

  Shape shape_;
  int first_ = 0;
  cudaStream_t stream_ = nullptr;
  layout::WindowLayout layout_{};
  std::vector<std::vector<RankPlan>> plans_;  // [set][rank]
  std::vector<std::byte*> windows_;           // [ranks]
  std::vector<bool> opened_;
  std::vector<Local> locals_;
  std::vector<void*> allocations_;
  std::byte** device_windows_ = nullptr;
  kernels::cuda::PlacementArrays placement_{};
  Mismatches* mismatches_ = nullptr;        // device
  std::uint64_t* fault_records_ = nullptr;  // pinned
};

}  // namespace wherry::bench
