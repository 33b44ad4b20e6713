// wherry_gpu check | soak [STEPS] | sanitize | time FILE.json [launch|processes]
//
// check     every layout against the oracle, all ranks in one launch: plan, rows, entries, sums, bit
//           by bit, in NaN-poisoned windows; halves, captured graphs, faults
// soak      one process a rank, no barrier between steps, random delays: start CUDA MPS first
// sanitize  a few small shapes, for compute-sanitizer
// time      medians beside the copy floor of the same run; checks each shape it times
#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <utility>

#include "cluster.hpp"
#include "processes.hpp"
#include "wherry/error.hpp"

namespace wherry::bench {

namespace cuda = kernels::cuda;

namespace {

// --- One checked step -----------------------------------------------------------------------------

bool report(const char* name, const Mismatches& found, bool plan_right, bool host_right) {
  const bool good = found.rows + found.entries + found.sums == 0 && plan_right && host_right;
  if (!good) {
    const int* f = found.first;
    std::printf("FAILED %s: %llu row, %llu entry, %llu sum mismatches; plan %s; host sums %s\n"
                "  first: kind %d rank %d row %d column %d expected %x found %x\n",
                name, found.rows, found.entries, found.sums, plan_right ? "right" : "WRONG",
                host_right ? "right" : "WRONG", f[0], f[1], f[2], f[3],
                static_cast<unsigned>(f[4]), static_cast<unsigned>(f[5]));
  }
  return good;
}

struct StepOptions {
  bool halves = false;      // the four half launches (and two of the plan) instead of the fused ones
  bool host_sums = true;
};

bool checked_step(Cluster& cluster, int set, int generation, const StepOptions& options,
                  const char* name) {
  cluster.load_set(set);
  cluster.poison_windows();
  if (options.halves) {
    cluster.plan(generation, cuda::CountStep::send);
    cluster.plan(generation, cuda::CountStep::recv);
    cluster.dispatch_send(generation);
    cluster.dispatch_recv(generation);
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

std::string describe(const Shape& s) {
  const char* layouts[] = {"tokens", "grouped", "slots"};
  std::string text = layouts[static_cast<int>(s.layout)];
  text += s.reduction == Reduction::by_token ? " by_token" : " by_rank";
  text += ' ';
  text += std::to_string(s.ranks) + "x" + std::to_string(s.blocks) + " T" + std::to_string(s.tokens) +
          " H" + std::to_string(s.hidden) + " K" + std::to_string(s.topk) + " E" + std::to_string(s.experts) +
          " depth" + std::to_string(s.depth);
  if (s.e4m3) text += " e4m3";
  if (s.fill) text += " fill";
  if (!s.bulk) text += " copy";
  if (s.uneven) text += " uneven";
  if (s.duplicates) text += " duplicates";
  if (s.absent > 0) text += " absent";
  if (s.alignment > 1) text += " aligned" + std::to_string(s.alignment);
  return text;
}

std::vector<Shape> check_shapes() {
  const Layout kTokens = Layout::tokens, kGrouped = Layout::grouped, kSlots = Layout::slots;
  const Reduction kToken = Reduction::by_token, kRank = Reduction::by_rank;
  std::vector<Shape> shapes;
  const auto add = [&](Shape shape) { shapes.push_back(shape); };
  for (const bool bulk : {true, false}) {
    add({.ranks = 8, .tokens = 128, .hidden = 7168, .layout = kTokens, .bulk = bulk, .blocks = 8});
    add({.ranks = 4, .tokens = 100, .layout = kTokens, .bulk = bulk, .uneven = true, .duplicates = true, .absent = 0.3});
    add({.ranks = 3, .tokens = 67, .hidden = 2880, .topk = 6, .experts = 31, .layout = kTokens, .depth = 3, .bulk = bulk});
    add({.ranks = 8, .tokens = 64, .layout = kGrouped, .reduction = kRank, .alignment = 8, .bulk = bulk, .duplicates = true, .absent = 0.2});
    add({.ranks = 8, .tokens = 64, .layout = kGrouped, .reduction = kToken, .bulk = bulk, .uneven = true, .absent = 0.1});
    add({.ranks = 4, .tokens = 96, .hidden = 1024, .layout = kGrouped, .reduction = kRank, .alignment = 16, .fill = true, .bulk = bulk, .duplicates = true});
    add({.ranks = 8, .tokens = 32, .hidden = 2048, .layout = kSlots, .reduction = kToken, .bulk = bulk, .duplicates = true, .absent = 0.2});
  }
  for (const int hidden : {1, 8, 2050, 2056}) {  // odd rows: no bulk copies, some no 16-byte copies
    add({.ranks = 2, .tokens = 33, .hidden = hidden, .topk = 3, .experts = 7, .layout = kTokens});
    add({.ranks = 2, .tokens = 33, .hidden = hidden, .topk = 3, .experts = 7, .layout = kGrouped, .reduction = kToken});
  }
  for (const int topk : {1, 9, 12, 22, 32}) {
    add({.ranks = 5, .tokens = 40, .hidden = 256, .topk = topk, .experts = 129, .layout = kTokens});
    add({.ranks = 7, .tokens = 40, .hidden = 256, .topk = topk, .experts = 129, .layout = kGrouped, .reduction = kToken});
  }
  add({.ranks = 8, .tokens = 128, .hidden = 7168, .experts = 256, .layout = kSlots, .reduction = kToken, .e4m3 = true, .blocks = 16});
  add({.ranks = 8, .tokens = 1, .hidden = 7168, .experts = 256, .layout = kSlots, .reduction = kToken, .e4m3 = true, .blocks = 16});
  add({.ranks = 1, .tokens = 50, .hidden = 640, .layout = kGrouped, .alignment = 4});
  add({.ranks = 8, .tokens = 40, .hidden = 128, .experts = 1025, .layout = kGrouped});
  add({.ranks = 2, .tokens = 50, .hidden = 65536, .topk = 2, .experts = 8, .layout = kTokens});
  return shapes;
}

// A graph of `depth` steps of one set, captured once, replayed for other routings and payloads.
bool replays_are_right(const Shape& shape) {
  Cluster cluster({.shape = shape});
  cluster.load_set(0);
  CUDA_OK(cudaStreamSynchronize(cluster.stream()));
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  CUDA_OK(cudaStreamBeginCapture(cluster.stream(), cudaStreamCaptureModeGlobal));
  for (int g = 0; g < shape.depth; ++g) {
    cluster.plan(g);
    cluster.dispatch(g);
    // The experts' part here is what they wrote for this set before the capture's replay.
    cluster.combine(g);
  }
  CUDA_OK(cudaStreamEndCapture(cluster.stream(), &graph));
  CUDA_OK(cudaGraphInstantiate(&executable, graph, 0));
  bool good = true;
  for (int replay = 0; replay < 12; ++replay) {
    const int set = (replay * 2) % shape.sets;
    cluster.load_set(set);
    cluster.poison_windows();
    CUDA_OK(cudaGraphLaunch(executable, cluster.stream()));  // fills rows; sums poison
    for (int g = 0; g < shape.depth; ++g) cluster.experts(g, set);
    CUDA_OK(cudaGraphLaunch(executable, cluster.stream()));  // sums what the experts wrote
    cluster.check_sums(set);
    for (int g = 0; g < shape.depth; ++g) good = cluster.plan_is_right(g, set) && good;
  }
  good = report("graph", cluster.mismatches(), good, true);
  CUDA_OK(cudaGraphExecDestroy(executable));
  CUDA_OK(cudaGraphDestroy(graph));
  return good;
}

// One rank does not take part: the others end, and all name it.
bool faults_are_right() {
  Shape shape{.ranks = 3, .tokens = 16, .hidden = 128, .topk = 2, .experts = 8};
  Cluster cluster({.shape = shape, .deadline_s = 0.02});
  bool good = checked_step(cluster, 0, 0, {}, "before the fault");
  cluster.launch_ranks = 2;
  cluster.dispatch(1);
  cluster.combine(1);  // leaves at once
  CUDA_OK(cudaStreamSynchronize(cluster.stream()));
  for (int rank = 0; rank < 2; ++rank) {
    const layout::Fault f = cluster.fault(rank);
    const bool right = f.cause == static_cast<std::uint32_t>(ErrorCode::timeout) + 1 && f.blamed == 2 &&
                       f.stage == static_cast<std::uint32_t>(Stage::dispatch_recv) && f.step == 2;
    if (!right) {
      std::printf("FAILED fault of rank %d: cause %u stage %u blamed %u reporter %u step %u\n", rank, f.cause,
                  f.stage, f.blamed, f.reporter, f.step);
    }
    good = good && right;
  }
  cluster.launch_ranks = 3;  // the rank that comes late leaves at once as well
  cluster.dispatch(1);
  CUDA_OK(cudaStreamSynchronize(cluster.stream()));
  const layout::Fault late = cluster.fault(2);
  if (late.blamed != 2 || late.cause == 0) {
    std::printf("FAILED the late rank saw cause %u blamed %u\n", late.cause, late.blamed);
    good = false;
  }
  return good;
}

int run_checks() {
  int failed = 0, cases = 0;
  for (const Shape& shape : check_shapes()) {
    const std::string name = describe(shape);
    Cluster cluster({.shape = shape});
    bool good = true;
    for (int step = 0; step < 2 * shape.depth + 1; ++step) {
      const StepOptions options{.halves = step % 2 == 1,
                                .host_sums = step < 2 && shape.hidden * shape.tokens < 300000};
      good = checked_step(cluster, step % shape.sets, step % shape.depth, options, name.c_str()) && good;
    }
    for (int local = 0; local < shape.ranks; ++local) {
      const layout::Fault f = cluster.fault(local);
      if (f.cause == 0) continue;
      std::printf("FAILED %s: rank %d fault cause %u stage %u blamed %u step %u\n", name.c_str(), local,
                  f.cause, f.stage, f.blamed, f.step);
      good = false;
      break;
    }
    std::printf("%s %s\n", good ? "ok    " : "FAILED", name.c_str());
    ++cases;
    failed += good ? 0 : 1;
  }
  const auto one = [&](const char* name, bool good) {
    std::printf("%s %s\n", good ? "ok    " : "FAILED", name);
    ++cases;
    failed += good ? 0 : 1;
  };
  one("graph replay, tokens", replays_are_right({.ranks = 8, .hidden = 1024, .layout = Layout::tokens, .sets = 5}));
  one("graph replay, grouped by_rank, filled on arrival",
      replays_are_right({.ranks = 4, .layout = Layout::grouped, .depth = 3, .alignment = 8, .fill = true, .sets = 5}));
  one("graph replay, slots e4m3",
      replays_are_right({.ranks = 8, .tokens = 16, .hidden = 1024, .layout = Layout::slots,
                         .reduction = Reduction::by_token, .e4m3 = true, .sets = 5}));
  one("faults", faults_are_right());
  std::printf("%d of %d cases failed\n", failed, cases);
  return failed == 0 ? 0 : 1;
}

int run_sanitize() {
  bool good = true;
  const std::vector<Shape> shapes = {
      {.ranks = 2, .tokens = 9, .hidden = 512, .topk = 3, .experts = 6, .blocks = 2, .sets = 2},
      {.ranks = 2, .tokens = 9, .hidden = 50, .topk = 3, .experts = 6, .blocks = 2, .sets = 2},
      {.ranks = 2, .tokens = 9, .hidden = 256, .topk = 3, .experts = 6, .layout = Layout::grouped,
       .alignment = 4, .fill = true, .blocks = 2, .sets = 2},
      {.ranks = 2, .tokens = 5, .hidden = 512, .topk = 3, .experts = 6, .layout = Layout::slots,
       .reduction = Reduction::by_token, .e4m3 = true, .blocks = 2, .sets = 2},
  };
  for (const Shape& shape : shapes) {
    Cluster cluster({.shape = shape, .deadline_s = 200.0});
    for (int step = 0; step < 3; ++step) {
      good = checked_step(cluster, step % 2, step % 2, {.halves = step == 1}, describe(shape).c_str()) && good;
    }
  }
  std::printf("sanitize: %s\n", good ? "ok" : "FAILED");
  return good ? 0 : 1;
}

// --- Soak -----------------------------------------------------------------------------------------

// Halves, two generations in flight, no barrier: combine(t - 1) comes after dispatch(t).
int soak_rank(int rank, SharedPage& page, const Shape& shape, int steps) {
  Cluster cluster({.shape = shape, .first_rank = rank, .local_ranks = 1, .gather = page.gather(rank)});
  page.barrier();
  constexpr int kMostDelay = 40;
  const auto combine = [&](int step) {
    cluster.delay(4 * step + 1, kMostDelay);
    cluster.combine_send(step % shape.depth);
    cluster.delay(4 * step + 2, kMostDelay);
    cluster.combine_recv(step % shape.depth);
    cluster.check_sums(step % shape.sets);
  };
  for (int step = 0; step < steps; ++step) {
    const int generation = step % shape.depth;
    const int set = step % shape.sets;
    if (shape.depth == 1 && step > 0) combine(step - 1);
    cluster.load_set(set);
    cluster.plan(generation, step % 2 == 0 ? cuda::CountStep::both : cuda::CountStep::send);
    if (step % 2 != 0) cluster.plan(generation, cuda::CountStep::recv);
    cluster.delay(4 * step, kMostDelay);
    cluster.dispatch_send(generation);
    cluster.delay(4 * step + 3, kMostDelay);
    cluster.dispatch_recv(generation);
    cluster.experts(generation, set);
    if (shape.depth > 1 && step > 0) combine(step - 1);
  }
  combine(steps - 1);
  const Mismatches found = cluster.mismatches();
  const layout::Fault fault = cluster.fault(0);
  if (fault.cause != 0) {
    std::printf("rank %d: fault cause %u stage %u blamed %u step %u\n", rank, fault.cause, fault.stage,
                fault.blamed, fault.step);
  }
  const bool good = report("soak", found, true, true) && fault.cause == 0;
  page.barrier();  // windows stay until all are done
  return good ? 0 : 1;
}

int run_soak(int steps) {
  bool good = true;
  const std::vector<Shape> shapes = {
      {.ranks = 8, .tokens = 48, .hidden = 1024, .layout = Layout::tokens, .depth = 2, .blocks = 4, .sets = 5},
      {.ranks = 8, .tokens = 48, .hidden = 1024, .layout = Layout::tokens, .depth = 1, .blocks = 4, .sets = 5},
      {.ranks = 4, .tokens = 64, .hidden = 512, .layout = Layout::grouped, .depth = 2, .alignment = 8,
       .fill = true, .uneven = true, .absent = 0.2, .blocks = 4, .sets = 5},
      {.ranks = 8, .tokens = 16, .hidden = 2048, .layout = Layout::slots, .reduction = Reduction::by_token,
       .depth = 2, .e4m3 = true, .blocks = 4, .sets = 5},
  };
  for (const Shape& shape : shapes) {
    const bool right = run_processes(
        shape.ranks, [&](int rank, SharedPage& page) { return soak_rank(rank, page, shape, steps); },
        [](const SharedPage&) {});
    std::printf("%s soak of %d steps: %s\n", right ? "ok    " : "FAILED", steps, describe(shape).c_str());
    good = good && right;
  }
  return good ? 0 : 1;
}

// --- Timing ---------------------------------------------------------------------------------------

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

// Microseconds of one call, by replays of a graph of `calls` of them.
struct Timing {
  float median_us = 0, p99_us = 0;
};
template <typename Call>
Timing time_replays(Cluster& cluster, int calls, int replays, Call call) {
  cudaStream_t stream = cluster.stream();
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  CUDA_OK(cudaStreamSynchronize(stream));
  CUDA_OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  for (int i = 0; i < calls; ++i) call(i % cluster.shape().depth);
  CUDA_OK(cudaStreamEndCapture(stream, &graph));
  CUDA_OK(cudaGraphInstantiate(&executable, graph, 0));
  cudaEvent_t begin, end;
  CUDA_OK(cudaEventCreate(&begin));
  CUDA_OK(cudaEventCreate(&end));
  std::vector<float> times;
  for (int i = 0; i < replays + 2; ++i) {
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
    std::fprintf(file_,
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
    std::fprintf(file_,
                 "%s\n  {\"ranks_as\": \"%s\", \"stage\": \"%s\", \"variant\": \"%s\", \"shape\": \"%s\", "
                 "\"ranks\": %d, \"sms\": %d, \"tokens\": %d, \"hidden\": %d, \"topk\": %d, \"experts\": %d, "
                 "\"median_us\": %.2f, \"p99_us\": %.2f, \"floor_us\": %.2f, \"floor_percent\": %.1f, "
                 "\"copy_gbps\": %.0f, \"right\": %s}",
                 first_ ? "" : ",", row.ranks_as, row.stage, row.variant.c_str(), describe(row.shape).c_str(),
                 row.shape.ranks, row.shape.blocks, row.shape.tokens, row.shape.hidden, row.shape.topk,
                 row.shape.experts, static_cast<double>(row.timing.median_us),
                 static_cast<double>(row.timing.p99_us), floor_us, share, row.copy_gbps,
                 row.right ? "true" : "false");
    first_ = false;
    std::fflush(file_);
    std::printf("%-9s %dx%-2d T%-4d %-16s %-22s %8.1f us  %5.1f%% of floor  p99 %8.1f%s\n", row.ranks_as,
                row.shape.ranks, row.shape.blocks, row.shape.tokens, row.stage, row.variant.c_str(),
                static_cast<double>(row.timing.median_us), share, static_cast<double>(row.timing.p99_us),
                row.right ? "" : "  WRONG");
    std::fflush(stdout);
  }

 private:
  FILE* file_;
  bool first_ = true;
};

double dispatch_bytes(const Shape& shape, std::int64_t rows, std::int64_t tokens) {
  return static_cast<double>(rows) * static_cast<double>(shape.row_bytes()) +
         static_cast<double>(tokens) * static_cast<double>(shape.x_bytes());
}
double combine_bytes(const Shape& shape, std::int64_t rows, std::int64_t tokens) {
  return static_cast<double>(rows + tokens) * static_cast<double>(shape.x_bytes());
}

std::string shape_name(const cuda::DispatchShape& s) {
  if (s.stages == 0) return "copy piece " + std::to_string(s.piece_bytes);
  return std::to_string(s.warps) + "w" + std::to_string(s.stages) + "s" + std::to_string(s.stores_in_flight) +
         " piece " + std::to_string(s.piece_bytes);
}

// All ranks in one launch. `variants`: other shapes of dispatch to try.
void time_in_one_launch(Results& results, const Shape& shape, double copy_gbps,
                        const std::vector<cuda::DispatchShape>& variants) {
  Cluster cluster({.shape = shape});
  bool right = checked_step(cluster, 0, 0, {.host_sums = false}, "timed shape");
  right = checked_step(cluster, 0, 1 % shape.depth, {.host_sums = false}, "timed shape") && right;
  const bool decode = shape.tokens <= 128;
  const int calls = decode ? 50 : 6;
  const int replays = decode ? 15 : 9;
  const std::int64_t rows = cluster.rows_sent(0);
  const auto add = [&](const char* stage, const std::string& variant, const Timing& timing, double bytes) {
    results.add({"launch", shape, stage, variant, timing, bytes, copy_gbps, right});
  };
  const double to = dispatch_bytes(shape, rows, cluster.tokens());
  const double home = combine_bytes(shape, rows, cluster.tokens());
  const auto dispatch = [&](int g) { cluster.dispatch(g); };
  const std::string name = shape.e4m3 ? "e4m3" : shape_name(cluster.dispatch_shape);
  add("plan", "", time_replays(cluster, calls, replays, [&](int g) { cluster.plan(g); }), 0.0);
  add("dispatch", name, time_replays(cluster, calls, replays, dispatch), to);
  add("plan+dispatch", name, time_replays(cluster, calls, replays, [&](int g) {
        cluster.plan(g);
        cluster.dispatch(g);
      }), to);
  const cuda::DispatchShape chosen = cluster.dispatch_shape;
  for (const cuda::DispatchShape& variant : variants) {
    cluster.dispatch_shape = variant;
    add("dispatch", shape_name(variant), time_replays(cluster, calls, replays, dispatch), to);
  }
  cluster.dispatch_shape = chosen;
  add("combine", std::to_string(cluster.combine_shape.parts) + " parts",
      time_replays(cluster, calls, replays, [&](int g) { cluster.combine(g); }), home);
  if (decode) {
    for (const int parts : {2, 4, 8, 16}) {
      if (parts == cluster.combine_shape.parts) continue;
      cluster.combine_shape.parts = parts;
      add("combine", std::to_string(parts) + " parts",
          time_replays(cluster, calls, replays, [&](int g) { cluster.combine(g); }), home);
    }
  }
  const Mismatches found = cluster.mismatches();
  if (found.rows + found.entries + found.sums != 0) std::printf("WRONG after timing\n");
}

// One rank of a process each: events between the stages of a captured graph; the slowest rank counts.
int time_rank(int rank, SharedPage& page, const Shape& shape) {
  if (rank == 0) {
    cudaStream_t stream;
    CUDA_OK(cudaStreamCreate(&stream));
    page.copy_gbps = copy_rate(stream);
  }
  page.barrier();
  Cluster cluster({.shape = shape, .first_rank = rank, .local_ranks = 1, .gather = page.gather(rank)});
  page.barrier();
  bool right = true;
  for (int g = 0; g < shape.depth; ++g) {
    right = checked_step(cluster, 0, g, {.host_sums = false}, "timed shape") && right;
    page.barrier();  // poison_windows of the next step must not meet a peer's reads of this one
  }
  constexpr int kSteps = 10;
  constexpr int kReplays = 8;
  const int steps = kSteps / shape.depth * shape.depth;
  cudaEvent_t events[2 * kSteps + 1];
  for (cudaEvent_t& event : events) CUDA_OK(cudaEventCreate(&event));
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  CUDA_OK(cudaStreamBeginCapture(cluster.stream(), cudaStreamCaptureModeThreadLocal));
  const auto record = [&](int at) {
    CUDA_OK(cudaEventRecordWithFlags(events[at], cluster.stream(), cudaEventRecordExternal));
  };
  record(0);
  for (int step = 0; step < steps; ++step) {
    cluster.dispatch(step % shape.depth);
    record(2 * step + 1);
    cluster.combine(step % shape.depth);
    record(2 * step + 2);
  }
  CUDA_OK(cudaStreamEndCapture(cluster.stream(), &graph));
  CUDA_OK(cudaGraphInstantiate(&executable, graph, 0));
  int samples = 0;
  for (int replay = 0; replay < kReplays; ++replay) {
    page.barrier();
    CUDA_OK(cudaGraphLaunch(executable, cluster.stream()));
    CUDA_OK(cudaStreamSynchronize(cluster.stream()));
    for (int step = 1; replay > 0 && step < steps; ++step) {  // step 0: ranks start at different times
      for (int stage = 0; stage < 2; ++stage) {
        float ms = 0;
        CUDA_OK(cudaEventElapsedTime(&ms, events[2 * step + stage], events[2 * step + stage + 1]));
        page.samples[rank][stage][samples] = ms * 1000.0F;
      }
      ++samples;
    }
  }
  cluster.check_sums(0);
  right = report("after timing", cluster.mismatches(), true, true) && cluster.fault(0).cause == 0 && right;
  page.barrier();
  return right ? 0 : 1;
}

bool time_in_processes(Results& results, const Shape& shape) {
  std::int64_t rows = 0, tokens = 0;
  for (int rank = 0; rank < shape.ranks; ++rank) tokens += shape.tokens_of(rank);
  for (const RankPlan& plan : make_plans(shape, 0)) {
    if (shape.layout == Layout::tokens) {
      rows += static_cast<std::int64_t>(plan.token_rows.size());
    } else {
      for (const std::int32_t count : plan.slot_counts) rows += count;
    }
  }
  const bool good = run_processes(
      shape.ranks, [&](int rank, SharedPage& page) { return time_rank(rank, page, shape); },
      [&](const SharedPage& page) {
        const char* stages[] = {"dispatch", "combine"};
        for (int stage = 0; stage < 2; ++stage) {
          std::vector<float> slowest;
          for (int sample = 0; sample < kMaxSamples; ++sample) {
            float most = 0;
            for (int rank = 0; rank < shape.ranks; ++rank) most = std::max(most, page.samples[rank][stage][sample]);
            if (most > 0) slowest.push_back(most);
          }
          const double bytes = stage == 0 ? dispatch_bytes(shape, rows, tokens) : combine_bytes(shape, rows, tokens);
          results.add({"processes", shape, stages[stage], "", {median(slowest), percentile99(slowest)}, bytes,
                       page.copy_gbps, true});
        }
      });
  if (!good) std::printf("FAILED timing as processes: %s\n", describe(shape).c_str());
  return good;
}

Shape throughput(int ranks, int blocks, int hidden = 7168, int topk = 8) {
  return {.ranks = ranks, .tokens = 4096, .hidden = hidden, .topk = topk, .experts = 256, .blocks = blocks, .sets = 1};
}
Shape decode(int tokens) {
  return {.ranks = 8, .tokens = tokens, .hidden = 7168, .topk = 8, .experts = 256, .layout = Layout::slots,
          .reduction = Reduction::by_token, .depth = 2, .e4m3 = true, .blocks = 16, .sets = 1};
}

int run_time(const char* path, const std::string& mode, const std::string& command) {
  Results results(path, command);
  const std::pair<int, int> kShapes[] = {{8, 16}, {8, 8}, {8, 4}, {4, 32}, {4, 24}, {4, 16}};
  bool good = true;
  if (mode == "processes") {
    for (const auto& [ranks, blocks] : kShapes) good = time_in_processes(results, throughput(ranks, blocks)) && good;
    for (const int tokens : {128, 16, 1}) good = time_in_processes(results, decode(tokens)) && good;
    return good ? 0 : 1;
  }
  cudaStream_t stream;
  CUDA_OK(cudaStreamCreate(&stream));
  const double gbps = copy_rate(stream);
  std::printf("copy %.0f GB/s read + write\n", gbps);
  for (const auto& [ranks, blocks] : kShapes) {
    time_in_one_launch(results, throughput(ranks, blocks), gbps,
                       {{blocks, 7, 2, 1, 14336}, {blocks, 5, 3, 1, 14336}, {blocks, 4, 6, 2, 7168}, {blocks, 4, 6, 3, 7168},
                        {blocks, 8, 3, 1, 7168}, {blocks, 5, 6, 3, 7168}, {blocks, 32, 0, 0, 14336}});
  }
  for (const int tokens : {128, 16, 1}) time_in_one_launch(results, decode(tokens), gbps, {});
  Shape grouped = throughput(8, 16);
  grouped.layout = Layout::grouped;
  grouped.depth = 1;
  time_in_one_launch(results, grouped, gbps, {});
  grouped.fill = true;
  time_in_one_launch(results, grouped, gbps, {});
  grouped.fill = false;
  grouped.reduction = Reduction::by_token;
  time_in_one_launch(results, grouped, gbps, {});
  for (const int hidden : {2880, 3584, 2056, 2050}) time_in_one_launch(results, throughput(8, 16, hidden), gbps, {});
  for (const int topk : {1, 6, 9, 12}) time_in_one_launch(results, throughput(8, 16, 7168, topk), gbps, {});
  return 0;
}

}  // namespace

}  // namespace wherry::bench

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  std::string command;
  for (int i = 0; i < argc; ++i) command.append(i > 0 ? " " : "").append(argv[i]);
  const std::string what = argc > 1 ? argv[1] : "";
  if (what == "check") return wherry::bench::run_checks();
  if (what == "sanitize") return wherry::bench::run_sanitize();
  if (what == "soak") return wherry::bench::run_soak(argc > 2 ? std::atoi(argv[2]) : 1000);
  if (what == "time" && argc > 2) return wherry::bench::run_time(argv[2], argc > 3 ? argv[3] : "launch", command);
  std::fprintf(stderr, "usage: wherry_gpu check | soak [STEPS] | sanitize | time FILE.json [launch|processes]\n");
  return 2;
}
