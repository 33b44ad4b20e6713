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
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "meeting.hpp"
#include "rank.hpp"
#include "replays.hpp"
#include "results.hpp"

namespace wherry::bench {

namespace {

constexpr Error::Where kWhere{};
#define CUDA_OK(call) ::wherry::cuda::check((call), kWhere, #call)

// Of all ranks, replay by replay, the slowest; on every rank.
std::vector<float> slowest(const Group& group, const std::vector<float>& mine) {
  std::vector<float> most;
  for (const Group::Bytes& bytes : group.allgather(std::as_bytes(std::span(mine)))) {
    const auto* theirs = reinterpret_cast<const float*>(bytes.data());
    const std::size_t count = bytes.size() / sizeof(float);
    most.resize(std::max(most.size(), count), 0.0F);
    for (std::size_t i = 0; i < count; ++i) most[i] = std::max(most[i], theirs[i]);
  }
  return most;
}

struct Bytes {
  double dispatch, combine;
};
Bytes fewest_bytes(RanksAs ranks_as, const Shape& shape) {
  const auto rows = static_cast<double>(rows_sent(shape));
  const auto tokens = static_cast<double>(shape.tokens) * shape.ranks;
  const auto row = static_cast<double>(shape.row_bytes() + shape.scale_bytes());
  const auto x = static_cast<double>(shape.x_bytes());
  if (ranks_as != RanksAs::gpus) return {rows * row + tokens * x, (rows + tokens) * x};
  // What a rank sends to the others: one row per (token, rank), and the sum of one home; by_token every
  // row. Choices are even, so its share stays at home.
  Shape crossing = shape;
  if (shape.reduction == Reduction::by_rank) crossing.layout = Layout::tokens;
  const double remote =
      static_cast<double>(rows_sent(crossing)) / shape.ranks * (shape.ranks - 1) / shape.ranks;
  return {remote * row, remote * x};
}

// --- A shape ------------------------------------------------------------------------------------

void time_shape(const Group& group, int ordinal, cudaStream_t stream, RanksAs ranks_as,
                const Shape& shape, const Results& results) {
  Meeting meeting(group, Seconds(60.0));
  double gbps = 0.0;
  if (ranks_as == RanksAs::gpus) {
    gbps = results.link_gbps();
  } else if (group.rank() == 0) {
    gbps = copy_rate();
  }
  meeting.meet();
  RankOnGpu rank(group, ordinal, stream, shape);
  for (int i = 0; i < 2 * shape.depth; ++i) {
    rank.checked_step();
    meeting.meet();
  }
  const bool decode = shape.tokens <= 128;
  const int steps = decode ? 20 * shape.depth : 3 * shape.depth;
  constexpr int kReplays = 32;
  Replays replays(ranks_as, group.rank(), meeting, stream);
  const Bytes bytes = fewest_bytes(ranks_as, shape);
  const auto add = [&](const char* stage, const std::vector<float>& us, double moved) {
    const std::vector<float> most = slowest(group, us);
    if (group.rank() == 0) results.add({ranks_as, shape, stage, most, moved, gbps});
  };
  const Calls dispatch = [&] { rank.dispatch(); };
  const Calls plan_dispatch = [&] { rank.plan_dispatch(); };
  const Calls combine = [&] { rank.combine(); };
  const Calls plan_apart = [&] {
    rank.plan();
    rank.dispatch();
  };

  const Times in_hand = replays.time(steps, kReplays, true, dispatch, combine);
  add("dispatch", in_hand.first, bytes.dispatch);
  add("combine", in_hand.second, bytes.combine);
  const Times step = replays.time(steps, kReplays, false, dispatch, combine);
  add("step", step.whole, bytes.dispatch + bytes.combine);
  const Times planned = replays.time(steps, kReplays, true, plan_dispatch, combine);
  add("plan_dispatch", planned.first, bytes.dispatch);
  const Times whole = replays.time(steps, kReplays, false, plan_dispatch, combine);
  add("planned_step", whole.whole, bytes.dispatch + bytes.combine);
  const Times apart = replays.time(steps, kReplays, true, plan_apart, combine);
  add("plan, dispatch", apart.first, bytes.dispatch);
  rank.checked_step();
  meeting.meet();
}

bool run_shape(RanksAs ranks_as, const Shape& shape, const Results& results) {
  try {
    if (ranks_as == RanksAs::threads) {
      CUDA_OK(cudaSetDevice(0));
      cudaStream_t stream = nullptr;
      CUDA_OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
      run_threads(shape.ranks, [&](Group& group) {
        CUDA_OK(cudaSetDevice(0));
        time_shape(group, 0, stream, ranks_as, shape, results);
      });
      CUDA_OK(cudaStreamDestroy(stream));
      return true;
    }
    run_processes(shape.ranks, [&](Group& group) {
      int devices = 1;
      CUDA_OK(cudaGetDeviceCount(&devices));
      const int ordinal = ranks_as == RanksAs::gpus ? group.rank() % devices : 0;
      CUDA_OK(cudaSetDevice(ordinal));
      cudaStream_t stream = nullptr;
      CUDA_OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
      time_shape(group, ordinal, stream, ranks_as, shape, results);
    });
    return true;
  } catch (const std::exception& error) {
    std::printf("FAILED %s %dx%d T%d H%d: %s\n", bench::name(ranks_as), shape.ranks, shape.num_sms,
                shape.tokens, shape.hidden, error.what());
    return false;
  }
}

Shape throughput(int ranks, int num_sms, int hidden = 7168, int topk = 8) {
  Shape shape;
  shape.ranks = ranks;
  shape.tokens = 4096;
  shape.hidden = hidden;
  shape.topk = topk;
  shape.experts = 256;
  shape.num_sms = num_sms;
  return shape;
}
Shape decode(int ranks, int tokens, int num_sms = 16) {
  Shape shape = throughput(ranks, num_sms);
  shape.tokens = tokens;
  shape.layout = Layout::slots;
  shape.reduction = Reduction::by_token;
  shape.e4m3 = true;
  return shape;
}
Shape grouped(int ranks, int num_sms, Reduction reduction, SumAt sum_at) {
  Shape shape = throughput(ranks, num_sms);
  shape.layout = Layout::grouped;
  shape.reduction = reduction;
  shape.sum_at = sum_at;
  shape.depth = 1;
  return shape;
}

std::vector<Shape> decode_over_link(int ranks) {
  std::vector<Shape> shapes;
  for (const int num_sms : {16, 64}) {
    for (const int tokens : {128, 16, 1}) shapes.push_back(decode(ranks, tokens, num_sms));
    // The same with one row home for each (token, rank).
    for (const int tokens : {128, 16, 1}) {
      Shape by_rank = decode(ranks, tokens, num_sms);
      by_rank.reduction = Reduction::by_rank;
      by_rank.sum_at = SumAt::expert;
      shapes.push_back(by_rank);
    }
  }
  return shapes;
}

std::vector<Shape> shapes_of(RanksAs ranks_as, const std::string& which) {
  const bool quick = which == "quick";
  std::vector<Shape> shapes;
  const bool only_decode = which == "decode";
  if (only_decode && ranks_as != RanksAs::gpus) {
    for (const int tokens : {128, 16, 1}) shapes.push_back(decode(8, tokens));
    for (Shape shape : decode_over_link(2)) {
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
    for (const int num_sms : {16, 24}) {
      if (only_decode) continue;
      shapes.push_back(grouped(devices, num_sms, Reduction::by_rank, SumAt::expert));
    }
    // Rows in 8 bits on their way out.
    for (const int num_sms : {8, 16, 24, 64}) {
      if (only_decode) continue;
      Shape shape = throughput(devices, num_sms);
      shape.e4m3 = true;
      shapes.push_back(shape);
    }
    for (const Shape& shape : decode_over_link(devices)) shapes.push_back(shape);
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
  Shape copied = throughput(8, 16);
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
  for (const Shape& shape : shapes_of(ranks_as, argc > 3 ? argv[3] : "")) {
    good = run_shape(ranks_as, shape, results) && good;
  }
  results.finish();
  return good ? 0 : 1;
}

}  // namespace

}  // namespace wherry::bench

int main(int argc, char** argv) { return wherry::bench::run(argc, argv); }
