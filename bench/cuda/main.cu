// wherry_gpu check | soak [STEPS] | sanitize | time FILE.json [launch|processes]
//
// check     every layout against the oracle, all ranks in one launch: plan, rows, entries, sums, bit
//           by bit, in NaN-poisoned windows; halves, captured graphs, faults
// soak      one process a rank, no barrier between steps, random delays: start CUDA MPS first
// sanitize  a few small shapes, for compute-sanitizer
// time      medians beside the copy floor of the same run; checks each shape it times
#include "step.hpp"

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  std::string command;
  for (int i = 0; i < argc; ++i) command.append(i > 0 ? " " : "").append(argv[i]);
  const std::string what = argc > 1 ? argv[1] : "";
  if (what == "check") return wherry::bench::run_checks();
  if (what == "sanitize") return wherry::bench::run_sanitize();
  if (what == "soak") return wherry::bench::run_soak(argc > 2 ? std::atoi(argv[2]) : 1000);
  if (what == "time" && argc > 2)
    return wherry::bench::run_time(argv[2], argc > 3 ? argv[3] : "launch", command);
  std::fprintf(
      stderr,
      "usage: wherry_gpu check | soak [STEPS] | sanitize | time FILE.json [launch|processes]\n");
  return 2;
}
