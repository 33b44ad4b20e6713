// One rank of a timed shape on a GPU: an exchange with what it is called with, and checks of what comes
// against the oracle, on the device.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "oracle.hpp"
#include "support/cuda.hpp"
#include "wherry/exchange.hpp"
#include "wherry/group.hpp"

namespace wherry::bench {

// What differs from the oracle; counts are since construction.
struct Mismatches {
  unsigned long long rows = 0, sums = 0;
  int first[6] = {};  // kind, rank, row or token, column, expected bits, found bits
};

class RankOnGpu {
 public:
  RankOnGpu(const Group& group, int ordinal, cudaStream_t stream, const GpuShape& shape);

  [[nodiscard]] const Exchange& exchange() const { return exchange_; }

  // Stream-ordered, each for the generation whose turn it is.
  void plan();
  void dispatch();       // with the plan in hand
  void plan_dispatch();  // in as few launches as the shape allows
  void combine();        // of results that lie in the window already, right or not

  // A whole step, its rows and sums compared. Throws std::runtime_error where they differ.
  void checked_step();

 private:
  [[nodiscard]] ConstTensorView x() const;
  [[nodiscard]] TensorView sums() const;
  void check_rows(const Received& received);

  GpuShape shape_;
  int ordinal_;
  int rank_;
  cudaStream_t stream_;
  Exchange exchange_;
  std::vector<Plan> plans_;  // [depth]
  std::size_t next_ = 0;     // plan of the next step
  Received received_;
  cuda::DeviceMemory x_, sums_, ids_, weights_, dest_, origins_, found_;
  int num_origins_ = 0;
};

// Rows that a dispatch of all ranks writes.
[[nodiscard]] std::int64_t rows_sent(const GpuShape& shape);

}  // namespace wherry::bench
