// Percentiles of repeated times.
#pragma once

#include <vector>

#include "report/output.hpp"

namespace wherry::cli {

struct Percentiles {
  double p50 = 0.0;
  double p99 = 0.0;
};

// Of at least one sample, by nearest rank: p99 of fewer than 100 samples is the largest.
[[nodiscard]] Percentiles percentiles(std::vector<double> samples);

// {"p50": ..., "p99": ...}, to the nanosecond for values in microseconds.
[[nodiscard]] Json to_json(const Percentiles& percentiles);

}  // namespace wherry::cli
