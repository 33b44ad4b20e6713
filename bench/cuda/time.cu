// Medians beside the copy floor of the same run: all ranks in one launch, or one process a rank.
// Each shape is checked against the oracle before it is timed.
#include <algorithm>
#include <cstdlib>
#include <utility>
#include <vector>

#include "processes.hpp"
#include "step.hpp"

namespace wherry::bench {

namespace cuda = kernels::cuda;

namespace {

float median(std::vector<float> values) {
  std::sort(values.begin(), values.end());
  return values.empty() ? 0.0F : values[values.size() / 2];
}
float percentile99(std::vector<float> values) {
  std::sort(values.begin(), values.end());
  return values.empty() ? 0.0F : values[(values.size() - 1) * 99 / 100];
}

// Bytes read plus bytes written, GB/s, of a large copy.
double copy_rate(cudaStream_t stream) {
  constexpr std::size_t kBytes = std::size_t{2} << 30;
  void *from = nullptr, *to = nullptr;
  CUDA_OK(cudaMalloc(&from, kBytes));
  CUDA_OK(cudaMalloc(&to, kBytes));
  CUDA_OK(cudaMemset(from, 0x5A, kBytes));
  cudaEvent_t begin, end;
  CUDA_OK(cudaEventCreate(&begin));
  CUDA_OK(cudaEventCreate(&end));
  std::vector<float> times;
  for (int i = 0; i < 12; ++i) {
    CUDA_OK(cudaEventRecord(begin, stream));
    CUDA_OK(cudaMemcpyAsync(to, from, kBytes, cudaMemcpyDeviceToDevice, stream));
    CUDA_OK(cudaEventRecord(end, stream));
    CUDA_OK(cudaEventSynchronize(end));
    float ms = 0;
    CUDA_OK(cudaEventElapsedTime(&ms, begin, end));
    if (i >= 2) times.push_back(ms);
  }
  CUDA_OK(cudaFree(from));
  CUDA_OK(cudaFree(to));
  return 2.0 * static_cast<double>(kBytes) / median(times) / 1e6;
}

// Bytes a second, GB/s, that this rank's GPU sends to the next one's while that sends to its own
// next; 0 where there is one GPU only. Every rank calls it.
double peer_rate(SharedPage& page) {
  constexpr std::size_t kBytes = std::size_t{1} << 30;
  int devices = 1, mine = 0;
  CUDA_OK(cudaGetDeviceCount(&devices));
  CUDA_OK(cudaGetDevice(&mine));
  if (devices == 1) return 0.0;
  const int next = (mine + 1) % devices;
  void *from = nullptr, *to = nullptr;
  cudaStream_t stream;
  cudaEvent_t begin, end;
  CUDA_OK(cudaMalloc(&from, kBytes));
  CUDA_OK(cudaMemset(from, 0x5A, kBytes));
  CUDA_OK(cudaDeviceEnablePeerAccess(next, 0));
  CUDA_OK(cudaSetDevice(next));
  CUDA_OK(cudaMalloc(&to, kBytes));
  CUDA_OK(cudaSetDevice(mine));
  CUDA_OK(cudaStreamCreate(&stream));
  CUDA_OK(cudaEventCreate(&begin));
  CUDA_OK(cudaEventCreate(&end));
  page.barrier();
  std::vector<float> times;
  for (int i = 0; i < 24; ++i) {
    CUDA_OK(cudaEventRecord(begin, stream));
    CUDA_OK(cudaMemcpyPeerAsync(to, next, from, mine, kBytes, stream));
    CUDA_OK(cudaEventRecord(end, stream));
    CUDA_OK(cudaEventSynchronize(end));
    float ms = 0;
    CUDA_OK(cudaEventElapsedTime(&ms, begin, end));
    if (i >= 2) times.push_back(ms);
  }
  page.barrier();
  CUDA_OK(cudaFree(from));
  CUDA_OK(cudaFree(to));
  return static_cast<double>(kBytes) / median(times) / 1e6;
}

// Microseconds of one call, by replays of a graph of `calls` of them.
struct Timing {
  float median_us = 0, p99_us = 0;
};
template <typename Call, typename Meet>
std::vector<float> replay_times(Cluster& cluster, int calls, int replays, Call call, Meet meet) {
  cudaStream_t stream = cluster.stream();
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  CUDA_OK(cudaStreamSynchronize(stream));
  CUDA_OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < calls; ++i) call(i % cluster.shape().depth);
  CUDA_OK(cudaStreamEndCapture(stream, &graph));
  CUDA_OK(cudaGraphInstantiate(&executable, graph, 0));
  cudaEvent_t begin, end;
  CUDA_OK(cudaEventCreate(&begin));
  CUDA_OK(cudaEventCreate(&end));
  std::vector<float> times;
  for (int i = 0; i < replays + 2; ++i) {
    meet();
    CUDA_OK(cudaEventRecord(begin, stream));
    CUDA_OK(cudaGraphLaunch(executable, stream));
    CUDA_OK(cudaEventRecord(end, stream));
    CUDA_OK(cudaEventSynchronize(end));
    float ms = 0;
    CUDA_OK(cudaEventElapsedTime(&ms, begin, end));
    if (i >= 2) times.push_back(ms * 1000.0F / static_cast<float>(calls));
  }
  CUDA_OK(cudaGraphExecDestroy(executable));
  CUDA_OK(cudaGraphDestroy(graph));
  return times;
}
template <typename Call>
Timing time_replays(Cluster& cluster, int calls, int replays, Call call) {
  const std::vector<float> times = replay_times(cluster, calls, replays, call, [] {});
  return {median(times), percentile99(times)};
}

class Results {
 public:
  explicit Results(const char* path, const std::string& command) : file_(std::fopen(path, "w")) {
    if (file_ == nullptr) {
      std::perror(path);
      std::exit(1);
    }
    const auto variable = [](const char* name) {
      const char* value = std::getenv(name);
      return std::string(value != nullptr ? value : "unknown");
    };
    std::fprintf(
        file_,
        "{\"machine\": \"%s\", \"driver\": \"%s\", \"nvcc\": \"%s\", \"cuda_runtime\": %d, "
        "\"commit\": \"%s\", \"command\": \"%s\",\n \"results\": [",
        variable("WHERRY_MACHINE").c_str(), variable("WHERRY_DRIVER").c_str(),
        variable("WHERRY_NVCC").c_str(), CUDART_VERSION, variable("WHERRY_COMMIT").c_str(),
        command.c_str());
  }
  ~Results() {
    std::fprintf(file_, "\n]}\n");
    std::fclose(file_);
  }
  Results(const Results&) = delete;
  Results& operator=(const Results&) = delete;

  struct Row {
    const char* ranks_as;
    const Shape& shape;
    const char* stage;
    std::string variant;
    Timing timing;
    double bytes;      // the fewest: each input read once, each output written once
    double copy_gbps;  // read + write
    bool right;
  };
  void add(const Row& row) {
    const double floor_us = row.bytes / row.copy_gbps / 1e3;
    const double share = 100.0 * floor_us / static_cast<double>(row.timing.median_us);
    std::fprintf(
        file_,
        "%s\n  {\"ranks_as\": \"%s\", \"stage\": \"%s\", \"variant\": \"%s\", \"shape\": \"%s\", "
        "\"ranks\": %d, \"sms\": %d, \"tokens\": %d, \"hidden\": %d, \"topk\": %d, \"experts\": "
        "%d, "
        "\"median_us\": %.2f, \"p99_us\": %.2f, \"floor_us\": %.2f, \"floor_percent\": %.1f, "
        "\"copy_gbps\": %.0f, \"right\": %s}",
        first_ ? "" : ",", row.ranks_as, row.stage, row.variant.c_str(),
        describe(row.shape).c_str(), row.shape.ranks, row.shape.blocks, row.shape.tokens,
        row.shape.hidden, row.shape.topk, row.shape.experts,
        static_cast<double>(row.timing.median_us), static_cast<double>(row.timing.p99_us), floor_us,
        share, row.copy_gbps, row.right ? "true" : "false");
    first_ = false;
    std::fflush(file_);
    std::printf("%-9s %dx%-2d T%-4d %-16s %-22s %8.1f us  %5.1f%% of floor  p99 %8.1f%s\n",
                row.ranks_as, row.shape.ranks, row.shape.blocks, row.shape.tokens, row.stage,
                row.variant.c_str(), static_cast<double>(row.timing.median_us), share,
                static_cast<double>(row.timing.p99_us), row.right ? "" : "  WRONG");
    std::fflush(stdout);
  }

 private:
  FILE* file_;
  bool first_ = true;
};

double dispatch_bytes(const Shape& shape, std::int64_t rows, std::int64_t tokens) {
  return static_cast<double>(rows) * static_cast<double>(shape.row_bytes() + shape.scale_bytes()) +
         static_cast<double>(tokens) * static_cast<double>(shape.x_bytes());
}
double combine_bytes(const Shape& shape, std::int64_t rows, std::int64_t tokens) {
  return static_cast<double>(rows + tokens) * static_cast<double>(shape.x_bytes());
}

std::string shape_name(const cuda::DispatchShape& s) {
  if (s.stages == 0) return "copy piece " + std::to_string(s.piece_bytes);
  return std::to_string(s.warps) + "w" + std::to_string(s.stages) + "s" +
         std::to_string(s.stores_in_flight) + " piece " + std::to_string(s.piece_bytes);
}

// All ranks in one launch. `variants`: other shapes of dispatch to try.
void time_in_one_launch(Results& results, const Shape& shape, double copy_gbps,
                        const std::vector<cuda::DispatchShape>& variants) {
  Cluster cluster({.shape = shape});
  bool right = checked_step(cluster, 0, 0, {.host_sums = false}, "timed shape");
  right = checked_step(cluster, 0, 1 % shape.depth, {.host_sums = false}, "timed shape") && right;
  const bool decode = shape.tokens <= 128;
  const int calls = decode ? 50 : 6;
  const int replays = 31;
  const std::int64_t rows = cluster.rows_sent(0);
  const auto add = [&](const char* stage, const std::string& variant, const Timing& timing,
                       double bytes) {
    results.add({"launch", shape, stage, variant, timing, bytes, copy_gbps, right});
  };
  const double to = dispatch_bytes(shape, rows, cluster.tokens());
  const double home = combine_bytes(shape, rows, cluster.tokens());
  const auto dispatch = [&](int g) { cluster.dispatch(g); };
  const std::string name = shape.e4m3 ? "e4m3" : shape_name(cluster.dispatch_shape);
  add("plan", "", time_replays(cluster, calls, replays, [&](int g) { cluster.plan(g); }), 0.0);
  add("dispatch", name, time_replays(cluster, calls, replays, dispatch), to);
  add("plan+dispatch", name,
      time_replays(cluster, calls, replays,
                   [&](int g) {
                     cluster.plan(g);
                     cluster.dispatch(g);
                   }),
      to);
  const cuda::PlanDispatchShape fused = cluster.fused_shape;
  if (fused.chunk_tokens != 0) {
    for (const bool bulk : {fused.bulk, !fused.bulk}) {
      cluster.fused_shape.bulk = bulk;
      right =
          checked_step(cluster, 0, 0, {.fused = true, .host_sums = false}, "timed shape") && right;
      add("plan+dispatch", std::string("one launch, ") + (bulk ? "bulk" : "stores"),
          time_replays(cluster, calls, replays, [&](int g) { cluster.plan_dispatch(g); }), to);
    }
    cluster.fused_shape = fused;
  }
  const cuda::DispatchShape chosen = cluster.dispatch_shape;
  for (const cuda::DispatchShape& variant : variants) {
    cluster.dispatch_shape = variant;
    add("dispatch", shape_name(variant), time_replays(cluster, calls, replays, dispatch), to);
  }
  cluster.dispatch_shape = chosen;
  const int threads = cluster.combine_shape.threads;
  for (const int each : {threads, 1536 - threads}) {  // 512 and 1024
    if (each != threads && shape.layout != Layout::tokens) continue;
    cluster.combine_shape.threads = each;
    add("combine",
        std::to_string(each) + " threads, " + std::to_string(cluster.combine_shape.parts) +
            " parts",
        time_replays(cluster, calls, replays, [&](int g) { cluster.combine(g); }), home);
  }
  cluster.combine_shape.threads = threads;
  add("both", name,
      time_replays(cluster, calls, replays,
                   [&](int g) {
                     cluster.dispatch(g);
                     cluster.combine(g);
                   }),
      to + home);
  const Mismatches found = cluster.mismatches();
  if (found.rows + found.entries + found.sums != 0) std::printf("WRONG after timing\n");
}

// One rank of a process each. With two generations a rank cannot be more than one step ahead of
// another, so a graph may repeat dispatch alone or combine alone; `both` is what a layer does.
int time_rank(int rank, SharedPage& page, const Shape& shape) {
  if (rank == 0) {
    cudaStream_t stream;
    CUDA_OK(cudaStreamCreate(&stream));
    page.copy_gbps = copy_rate(stream);
  }
  page.barrier();
  const double link = peer_rate(page);
  if (rank == 0) page.peer_gbps = link;
  page.barrier();
  Cluster cluster(
      {.shape = shape, .first_rank = rank, .local_ranks = 1, .gather = page.gather(rank)});
  page.barrier();
  bool right = true;
  for (int g = 0; g < shape.depth; ++g) {
    right = checked_step(cluster, 0, g, {.fused = g % 2 == 1, .host_sums = false}, "timed shape") &&
            right;
    page.barrier();  // the next poison must not meet a peer's reads of this step
  }
  const bool decode = shape.tokens <= 128;
  const int calls = decode ? 40 : 6;
  constexpr int kReplays = 32;
  for (int stage = 0; stage < kNumStages; ++stage) {
    if (stage == kCombineOther && shape.layout != Layout::tokens) continue;
    const int threads = cluster.combine_shape.threads;
    if (stage == kCombineOther) cluster.combine_shape.threads = 1536 - threads;  // of 512 and 1024
    const auto times = replay_times(
        cluster, calls, kReplays,
        [&](int g) {
          if (stage == kPlanDispatch) cluster.plan_dispatch(g);
          if (stage == kDispatch || stage == kBoth) cluster.dispatch(g);
          if (stage != kDispatch && stage != kPlanDispatch) cluster.combine(g);
        },
        [&] { page.barrier(); });
    cluster.combine_shape.threads = threads;
    for (std::size_t i = 0; i < times.size(); ++i) page.samples[rank][stage][i] = times[i];
    page.barrier();
  }
  cluster.check_sums(0);
  right = report("after timing", cluster.mismatches(), true, true) && cluster.fault(0).cause == 0 &&
          right;
  page.barrier();
  return right ? 0 : 1;
}

// `one_a_gpu`: there are as many GPUs, and the floor is the link's: what the busiest rank sends to (or
// gets from) the others at the rate of a peer copy; rows that stay at home are not counted.
bool time_in_processes(Results& results, const Shape& shape, bool one_a_gpu = false) {
  std::int64_t rows = 0, tokens = 0, remote = 0;
  for (int rank = 0; rank < shape.ranks; ++rank) tokens += shape.tokens_of(rank);
  for (const RankPlan& plan : make_plans(shape, 0)) {
    if (shape.layout == Layout::tokens) {
      rows += static_cast<std::int64_t>(plan.token_rows.size());
    } else {
      for (const std::int32_t count : plan.slot_counts) rows += count;
    }
  }
  // Choices are even: of the rows that a rank gets, its share comes from itself.
  remote = rows / shape.ranks * (shape.ranks - 1) / shape.ranks;
  const bool good = run_processes(
      shape.ranks, [&](int rank, SharedPage& page) { return time_rank(rank, page, shape); },
      [&](const SharedPage& page) {
        const char* stages[] = {"dispatch", "combine", "combine", "both", "plan+dispatch"};
        const char* variants[] = {"", "", "the other block size", "", ""};
        for (int stage = 0; stage < kNumStages; ++stage) {
          std::vector<float> slowest;  // of the ranks, replay by replay
          for (int sample = 0; sample < kMaxSamples; ++sample) {
            float most = 0;
            for (int rank = 0; rank < shape.ranks; ++rank)
              most = std::max(most, page.samples[rank][stage][sample]);
            if (most > 0) slowest.push_back(most);
          }
          if (slowest.empty()) continue;  // not measured for this shape
          const double to = dispatch_bytes(shape, rows, tokens);
          const double home = combine_bytes(shape, rows, tokens);
          double bytes = stage == kDispatch || stage == kPlanDispatch ? to
                         : stage == kBoth                             ? to + home
                                                                      : home;
          if (one_a_gpu) {
            const auto row = static_cast<double>(shape.row_bytes() + shape.scale_bytes());
            const auto result = static_cast<double>(shape.x_bytes());
            bytes =
                static_cast<double>(remote) * (stage == kDispatch || stage == kPlanDispatch ? row
                                               : stage == kBoth ? row + result
                                                                : result);
          }
          results.add({one_a_gpu ? "one a GPU" : "processes",
                       shape,
                       stages[stage],
                       variants[stage],
                       {median(slowest), percentile99(slowest)},
                       bytes,
                       one_a_gpu ? page.peer_gbps : page.copy_gbps,
                       true});
        }
      });
  if (!good) std::printf("FAILED timing as processes: %s\n", describe(shape).c_str());
  return good;
}

Shape throughput(int ranks, int blocks, int hidden = 7168, int topk = 8) {
  return {.ranks = ranks,
          .tokens = 4096,
          .hidden = hidden,
          .topk = topk,
          .experts = 256,
          .blocks = blocks,
          .sets = 1};
}
Shape decode(int tokens) {
  return {.ranks = 8,
          .tokens = tokens,
          .hidden = 7168,
          .topk = 8,
          .experts = 256,
          .layout = Layout::slots,
          .reduction = Reduction::by_token,
          .depth = 2,
          .e4m3 = true,
          .blocks = 16,
          .sets = 1};
}

}  // namespace

int run_time(const char* path, const std::string& mode, const std::string& command) {
  Results results(path, command);
  const std::pair<int, int> kShapes[] = {{8, 16}, {8, 8}, {8, 4}, {4, 32}, {4, 24}, {4, 16}};
  bool good = true;
  if (mode == "processes") {
    for (const auto& [ranks, blocks] : kShapes)
      good = time_in_processes(results, throughput(ranks, blocks)) && good;
    for (const int tokens : {128, 16, 1}) good = time_in_processes(results, decode(tokens)) && good;
    return good ? 0 : 1;
  }
  if (mode == "gpus") {
    int devices = 0;
    if (!run_processes(
            1, [](int, SharedPage& page) { return cudaGetDeviceCount(&page.ranks) != cudaSuccess; },
            [&](const SharedPage& page) { devices = page.ranks; }) ||
        devices < 2) {
      std::printf("there are %d GPUs; one rank a GPU needs two\n", devices);
      return 1;
    }
    for (const int blocks : {4, 8, 16, 24, 64})
      good = time_in_processes(results, throughput(devices, blocks), true) && good;
    for (const int tokens : {128, 16, 1}) {
      Shape shape = decode(tokens);
      shape.ranks = devices;
      good = time_in_processes(results, shape, true) && good;
    }
    return good ? 0 : 1;
  }
  cudaStream_t stream;
  CUDA_OK(cudaStreamCreate(&stream));
  const double gbps = copy_rate(stream);
  std::printf("copy %.0f GB/s read + write\n", gbps);
  for (const auto& [ranks, blocks] : kShapes) {
    time_in_one_launch(results, throughput(ranks, blocks), gbps,
                       {{blocks, 4, 3, 1, 14336},
                        {blocks, 7, 2, 1, 14336},
                        {blocks, 4, 6, 2, 7168},
                        {blocks, 8, 3, 1, 7168},
                        {blocks, 32, 0, 0, 14336}});
  }
  for (const int tokens : {128, 16, 1}) time_in_one_launch(results, decode(tokens), gbps, {});
  Shape grouped = throughput(8, 16);
  grouped.layout = Layout::grouped;
  grouped.depth = 1;
  time_in_one_launch(results, grouped, gbps, {});
  grouped.fill = true;
  time_in_one_launch(results, grouped, gbps, {});
  grouped.fill = false;
  grouped.partials = true;
  time_in_one_launch(results, grouped, gbps, {});
  grouped.partials = false;
  grouped.reduction = Reduction::by_token;
  time_in_one_launch(results, grouped, gbps, {});
  for (const int hidden : {2880, 3584, 2056, 2050})
    time_in_one_launch(results, throughput(8, 16, hidden), gbps, {});
  for (const int topk : {1, 6, 9, 12})
    time_in_one_launch(results, throughput(8, 16, 7168, topk), gbps, {});
  return 0;
}

}  // namespace wherry::bench
