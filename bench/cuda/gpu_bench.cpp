// gpu_bench FILE.json processes|threads|gpus [quick|decode]: medians of plan, dispatch and combine through the
// library's own calls, beside the floor of the same run, each shape checked before and after.
//
// processes  one process a rank on one GPU: start CUDA MPS first. The slowest rank counts
// threads    the ranks are threads of one process, so each stage is one launch for all of them
// gpus       one process and one GPU a rank; the floor is the link's, whose own figures come first
//
// A graph of several whole steps is replayed. `step` is one of it. The stages are told apart by stamps in
// another graph: kernels that read the clock (an event takes 20 us between processes under MPS). What a
// stamp takes by itself is measured there and taken off.
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "results.hpp"
#include "time_shape.hpp"

namespace wherry::bench {

namespace {

bool run_shape(RanksAs ranks_as, const GpuShape& shape, const Results& results) {
  constexpr int kReplays = 32;
  const double gbps = ranks_as == RanksAs::gpus ? results.link_gbps() : 0.0;
  try {
    time_shape(
        ranks_as, shape, gbps, kReplays,
        [&](const std::function<void(Group&)>& rank) {
          if (ranks_as == RanksAs::threads) {
            run_threads(shape.ranks, rank);
          } else {
            run_processes(shape.ranks, rank);
          }
        },
        [&](const ShapeTimes& times) {
          for (const StageTime& stage : times.stages) {
            results.add(
                {ranks_as, shape, times.kernels, stage.stage, stage.us, stage.bytes, times.gbps});
          }
        });
    return true;
  } catch (const std::exception& error) {
    std::printf("FAILED %s %dx%d T%d H%d: %s\n", bench::name(ranks_as), shape.ranks, shape.num_sms,
                shape.tokens, shape.hidden, error.what());
    return false;
  }
}

GpuShape throughput(int ranks, int num_sms, int hidden = 7168, int topk = 8) {
  GpuShape shape;
  shape.ranks = ranks;
  shape.tokens = 4096;
  shape.hidden = hidden;
  shape.topk = topk;
  shape.experts = 256;
  shape.num_sms = num_sms;
  return shape;
}
GpuShape decode(int ranks, int tokens, int num_sms = 16) {
  GpuShape shape = throughput(ranks, num_sms);
  shape.tokens = tokens;
  shape.layout = Layout::slots;
  shape.reduction = Reduction::by_token;
  shape.e4m3 = true;
  return shape;
}
GpuShape grouped(int ranks, int num_sms, Reduction reduction, SumAt sum_at) {
  GpuShape shape = throughput(ranks, num_sms);
  shape.layout = Layout::grouped;
  shape.reduction = reduction;
  shape.sum_at = sum_at;
  shape.depth = 1;
  return shape;
}

std::vector<GpuShape> decode_over_link(int ranks) {
  std::vector<GpuShape> shapes;
  for (const int num_sms : {16, 64}) {
    for (const int tokens : {128, 16, 1}) shapes.push_back(decode(ranks, tokens, num_sms));
    // The same with one row home for each (token, rank).
    for (const int tokens : {128, 16, 1}) {
      GpuShape by_rank = decode(ranks, tokens, num_sms);
      by_rank.reduction = Reduction::by_rank;
      by_rank.sum_at = SumAt::expert;
      shapes.push_back(by_rank);
    }
  }
  return shapes;
}

std::vector<GpuShape> shapes_of(RanksAs ranks_as, const std::string& which) {
  const bool quick = which == "quick";
  std::vector<GpuShape> shapes;
  const bool only_decode = which == "decode";
  if (only_decode && ranks_as != RanksAs::gpus) {
    for (const int tokens : {128, 16, 1}) shapes.push_back(decode(8, tokens));
    for (GpuShape shape : decode_over_link(2)) {
      shape.kernels = "cuda_link";  // on one GPU, by what would run on two
      shapes.push_back(shape);
    }
    return shapes;
  }
  if (ranks_as == RanksAs::gpus) {
    // Asked in a process of its own: this one must not touch CUDA before it forks.
    int devices = 0;
    const int status =
        std::system("exit $(nvidia-smi --query-gpu=name --format=csv,noheader | wc -l)");
    devices = WEXITSTATUS(status);
    for (const int num_sms : {4, 8, 16, 24, 32, 64}) {
      if (only_decode || (quick && num_sms != 16 && num_sms != 24)) continue;
      shapes.push_back(throughput(devices, num_sms));
    }
    if (quick) return shapes;
    // With rows in 8 bits on their way out: tokens, and grouped with and without.
    for (const int num_sms : {4, 8, 16, 24, 64}) {
      if (only_decode) continue;
      GpuShape tokens = throughput(devices, num_sms);
      GpuShape shape = grouped(devices, num_sms, Reduction::by_rank, SumAt::expert);
      shapes.push_back(shape);
      tokens.e4m3 = shape.e4m3 = true;
      shapes.push_back(tokens);
      shapes.push_back(shape);
    }
    for (const GpuShape& shape : decode_over_link(devices)) shapes.push_back(shape);
    return shapes;
  }
  for (const auto& [ranks, num_sms] :
       {std::pair{8, 16}, {8, 8}, {8, 4}, {4, 32}, {4, 24}, {4, 16}}) {
    shapes.push_back(throughput(ranks, num_sms));
    if (quick) break;
  }
  for (const int tokens : {128, 16, 1}) shapes.push_back(decode(8, tokens));
  if (quick) return shapes;
  shapes.push_back(grouped(8, 16, Reduction::by_rank, SumAt::home));
  shapes.push_back(grouped(8, 16, Reduction::by_rank, SumAt::expert));
  shapes.push_back(grouped(8, 16, Reduction::by_token, SumAt::home));
  if (ranks_as == RanksAs::processes) return shapes;
  for (const int hidden : {2880, 3584, 2056, 2050}) shapes.push_back(throughput(8, 16, hidden));
  for (const int topk : {1, 6, 9, 12}) shapes.push_back(throughput(8, 16, 7168, topk));
  GpuShape copied = throughput(8, 16);
  copied.kernels = "cuda_copy";
  shapes.push_back(copied);
  return shapes;
}

int run(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  const std::string how = argc > 2 ? argv[2] : "";
  const RanksAs ranks_as = how == "threads" ? RanksAs::threads
                           : how == "gpus"  ? RanksAs::gpus
                                            : RanksAs::processes;
  if (how != bench::name(ranks_as) && how != "gpus") {
    std::fprintf(stderr, "usage: gpu_bench FILE.json processes|threads|gpus [quick|decode]\n");
    return 2;
  }
  std::string command = "gpu_bench " + std::filesystem::path(argv[1]).filename().string();
  for (int i = 2; i < argc; ++i) command.append(" ").append(argv[i]);
  Results results(argv[1], command);
  bool good = true;
  if (ranks_as == RanksAs::gpus) results.measure_the_link();
  for (const GpuShape& shape : shapes_of(ranks_as, argc > 3 ? argv[3] : "")) {
    good = run_shape(ranks_as, shape, results) && good;
  }
  results.finish();
  return good ? 0 : 1;
}

}  // namespace

}  // namespace wherry::bench

int main(int argc, char** argv) { return wherry::bench::run(argc, argv); }
