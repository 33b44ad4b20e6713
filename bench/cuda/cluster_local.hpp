// What a Cluster keeps of one rank: device memory that no peer touches.
#pragma once

#include <vector>

#include "cluster.hpp"

namespace wherry::bench {

struct Cluster::Local {
  int rank = 0;
  kernels::cuda::RankContext context{};
  std::vector<kernels::cuda::PlanArrays> plans;  // [depth]
  std::int32_t* ids = nullptr;                   // current
  float* weights = nullptr;
  std::byte* x = nullptr;
  std::byte* out = nullptr;
  std::byte* count_workspace = nullptr;
  struct Set {
    std::int32_t *ids, *dest, *slot;
    float* weights;
    std::byte* x;
    Origin* origins;
    int num_origins;
    layout::TokenEntry* entries;
    int num_token_rows;
  };
  std::vector<Set> sets;
};

// Device memory of rows, by the oracle's functions.
void fill_payload(std::byte* x, DType dtype, int tokens, int hidden, int set, int rank,
                  cudaStream_t stream);

}  // namespace wherry::bench
