// The measurements of `wherry bench`, for programs and for people.
#pragma once

#include <vector>

#include "measure.hpp"
#include "report/output.hpp"

namespace wherry::cli {

struct Measurement {
  bench::Job job;
  bench::Report report;
};

[[nodiscard]] Json bench_json(const Measurement& measurement);
void print_bench(const Measurement& measurement);
// One row each; they differ in their tokens.
void print_bench_sweep(const std::vector<Measurement>& measurements);

}  // namespace wherry::cli
