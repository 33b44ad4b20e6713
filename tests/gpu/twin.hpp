// The same routing and rows through an exchange on the CPU and one on a GPU: plans, received rows,
// lists and sums must be equal bit for bit.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "gpu/memory.hpp"
#include "support/oracle.hpp"
#include "wherry/exchange.hpp"

namespace wherry::test {

struct Case {
  ExchangeConfig config;
  Batch batch;
  int steps = 3;             // each with other routings
  bool duplicates = false;   // some tokens name an expert twice
  bool wide_ids = false;     // int64
  bool halves = false;       // begin and finish apart
  bool fused = false;        // plan_dispatch
  bool own_results = false;  // y in memory of its own, not combine_input()
  bool own_rows = false;     // dispatch into memory of its own
  bool converted = false;    // x is in the dispatch_wire already
  int skewed = 0;            // bytes between x, its rows and those of out and 16 bytes of alignment
  bool no_weights = false;
  bool scalars = false;  // one fp32 a row, out and home
  bool addend = false;

  [[nodiscard]] std::string name() const;
};

// A configuration that fits the batch.
[[nodiscard]] ExchangeConfig config_of(const Batch& batch, Layout layout, Reduction reduction,
                                       DType dtype = DType::bf16);

// Called by every rank of `group`. `ordinal` is its GPU; ranks that are threads share `stream`.
// Throws std::runtime_error saying where the two differ.
void run_twin(const Group& group, int ordinal, cudaStream_t stream, const Case& test);

// What a rank brings to step `step`.
struct StepInput {
  std::vector<std::int32_t> ids;  // [tokens, topk]
  std::vector<float> weights;
  std::vector<std::byte> x;  // [tokens, hidden]; where rows are converted, also rows of extremes
  std::int64_t tokens = 0;
};
[[nodiscard]] StepInput input_of(const Case& test, int rank, int step);

// Any dtype as double, and back: rounding must only be deterministic, for both exchanges get the same
// bits.
[[nodiscard]] double load(DType dtype, const std::byte* at);
void store(DType dtype, std::byte* at, double value);

// Of dispatch.
[[nodiscard]] WireFormat way_out(const ExchangeConfig& config);
// Results stay as they are in the window: combine_input() exists.
[[nodiscard]] bool keeps_results(const ExchangeConfig& config);
// Rows travel in another format than they have, one way at least.
[[nodiscard]] bool converts(const ExchangeConfig& config);

// Runs body(group, ordinal, stream) on ranks that are processes, or threads on one GPU, which launch together.
void on_processes(int ranks, const std::function<void(Group&, int, cudaStream_t)>& body);
void on_threads(int ranks, const std::function<void(Group&, int, cudaStream_t)>& body);

}  // namespace wherry::test
