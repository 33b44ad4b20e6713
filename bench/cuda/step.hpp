// One step, checked against the oracle: what every command of the harness is made of.
#pragma once

#include <cstdio>
#include <string>

#include "cluster.hpp"
#include "wherry/error.hpp"

namespace wherry::bench {

int run_checks();
int run_sanitize();
int run_soak(int steps);
int run_time(const char* path, const std::string& mode, const std::string& command);

inline bool report(const char* name, const Mismatches& found, bool plan_right, bool host_right) {
  const bool good = found.rows + found.entries + found.sums == 0 && plan_right && host_right;
  if (!good) {
    const int* f = found.first;
    std::printf(
        "FAILED %s: %llu row, %llu entry, %llu sum mismatches; plan %s; host sums %s\n"
        "  first: kind %d rank %d row %d column %d expected %x found %x\n",
        name, found.rows, found.entries, found.sums, plan_right ? "right" : "WRONG",
        host_right ? "right" : "WRONG", f[0], f[1], f[2], f[3], static_cast<unsigned>(f[4]),
        static_cast<unsigned>(f[5]));
  }
  return good;
}

struct StepOptions {
  bool halves = false;  // the four half launches (and two of the plan) instead of the fused ones
  bool fused = false;   // plan and dispatch in one launch
  bool host_sums = true;
};

inline bool checked_step(Cluster& cluster, int set, int generation, const StepOptions& options,
                         const char* name) {
  cluster.load_set(set);
  cluster.poison_windows();
  if (options.halves) {
    cluster.plan(generation, kernels::cuda::CountStep::send);
    cluster.plan(generation, kernels::cuda::CountStep::recv);
    cluster.dispatch_send(generation);
    cluster.dispatch_recv(generation);
  } else if (options.fused) {
    cluster.plan_dispatch(generation);
  } else {
    cluster.plan(generation);
    cluster.dispatch(generation);
  }
  cluster.experts(generation, set);
  if (options.halves) {
    cluster.combine_send(generation);
    cluster.combine_recv(generation);
  } else {
    cluster.combine(generation);
  }
  cluster.check_sums(set);
  const bool plan_right = cluster.plan_is_right(generation, set);
  const bool host_right = !options.host_sums || cluster.sums_are_right_on_host(set);
  return report(name, cluster.mismatches(), plan_right, host_right);
}

inline std::string describe(const Shape& s) {
  const char* layouts[] = {"tokens", "grouped", "slots"};
  std::string text = layouts[static_cast<int>(s.layout)];
  text += s.reduction == Reduction::by_token ? " by_token" : " by_rank";
  text += ' ';
  text += std::to_string(s.ranks) + "x" + std::to_string(s.blocks) + " T" +
          std::to_string(s.tokens) + " H" + std::to_string(s.hidden) + " K" +
          std::to_string(s.topk) + " E" + std::to_string(s.experts) + " depth" +
          std::to_string(s.depth);
  if (s.e4m3) text += " e4m3";
  if (s.dtype != DType::bf16) text += s.dtype == DType::f16 ? " f16" : " f32";
  if (s.fill) text += " fill";
  if (s.partials) text += " partials";
  if (!s.bulk) text += " copy";
  if (s.uneven) text += " uneven";
  if (s.duplicates) text += " duplicates";
  if (s.absent > 0) text += " absent";
  if (s.alignment > 1) text += " aligned" + std::to_string(s.alignment);
  return text;
}

}  // namespace wherry::bench
