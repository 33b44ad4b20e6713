// The measurements of `wherry bench`, for programs and for people.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "measure.hpp"
#include "report/output.hpp"

namespace wherry::cli {

// "device" to "wire": what was measured, on CPUs and GPUs alike.
void add_shape(Json& object, const char* device, int ranks, const char* ranks_are,
               const ExchangeConfig& config);
// What a stage is called, and how long it took.
using Stages = std::vector<std::pair<const char*, bench::Spread>>;
// "p50", "p99" and "min" of each, as "NAME_us".
void add_spreads(Json& object, const Stages& stages);
// A row each; those of halves, NAME_send and NAME_recv, are set in.
[[nodiscard]] std::string spread_table(const Stages& stages);

struct Measurement {
  bench::Job job;
  bench::Report report;
};

[[nodiscard]] Json bench_json(const Measurement& measurement);
void print_bench(const Measurement& measurement);
// One row each; they differ in their tokens.
void print_bench_sweep(const std::vector<Measurement>& measurements);

}  // namespace wherry::cli
