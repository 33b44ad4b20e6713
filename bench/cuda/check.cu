// Every layout against the oracle, all ranks in one launch, in NaN-poisoned windows; captured graphs
// and faults; a few small shapes for compute-sanitizer.
#include <vector>

#include "step.hpp"

namespace wherry::bench {

namespace {

std::vector<Shape> check_shapes() {
  const Layout kTokens = Layout::tokens, kGrouped = Layout::grouped, kSlots = Layout::slots;
  const Reduction kToken = Reduction::by_token, kRank = Reduction::by_rank;
  std::vector<Shape> shapes;
  const auto add = [&](Shape shape) { shapes.push_back(shape); };
  for (const bool bulk : {true, false}) {
    add({.ranks = 8, .tokens = 128, .hidden = 7168, .layout = kTokens, .bulk = bulk, .blocks = 8});
    add({.ranks = 4,
         .tokens = 100,
         .layout = kTokens,
         .bulk = bulk,
         .uneven = true,
         .duplicates = true,
         .absent = 0.3});
    add({.ranks = 3,
         .tokens = 67,
         .hidden = 2880,
         .topk = 6,
         .experts = 31,
         .layout = kTokens,
         .depth = 3,
         .bulk = bulk});
    add({.ranks = 8,
         .tokens = 64,
         .layout = kGrouped,
         .reduction = kRank,
         .alignment = 8,
         .bulk = bulk,
         .duplicates = true,
         .absent = 0.2});
    add({.ranks = 8,
         .tokens = 64,
         .layout = kGrouped,
         .reduction = kToken,
         .bulk = bulk,
         .uneven = true,
         .absent = 0.1});
    add({.ranks = 8,
         .tokens = 64,
         .layout = kGrouped,
         .reduction = kRank,
         .partials = true,
         .bulk = bulk,
         .duplicates = true,
         .absent = 0.2});
    add({.ranks = 4,
         .tokens = 96,
         .hidden = 1024,
         .layout = kGrouped,
         .reduction = kRank,
         .alignment = 16,
         .partials = true,
         .fill = true,
         .bulk = bulk,
         .duplicates = true});
    add({.ranks = 8,
         .tokens = 32,
         .hidden = 2048,
         .layout = kSlots,
         .reduction = kToken,
         .bulk = bulk,
         .duplicates = true,
         .absent = 0.2});
  }
  for (const int hidden : {1, 8, 2050, 2056}) {  // odd rows: no bulk copies, some no 16-byte copies
    add({.ranks = 2, .tokens = 33, .hidden = hidden, .topk = 3, .experts = 7, .layout = kTokens});
    add({.ranks = 2,
         .tokens = 33,
         .hidden = hidden,
         .topk = 3,
         .experts = 7,
         .layout = kGrouped,
         .reduction = kToken});
  }
  for (const int topk : {1, 9, 12, 22, 32}) {
    add({.ranks = 5, .tokens = 40, .hidden = 256, .topk = topk, .experts = 129, .layout = kTokens});
    add({.ranks = 7,
         .tokens = 40,
         .hidden = 256,
         .topk = topk,
         .experts = 129,
         .layout = kGrouped,
         .reduction = kToken});
  }
  add({.ranks = 8,
       .tokens = 128,
       .hidden = 7168,
       .experts = 256,
       .layout = kSlots,
       .reduction = kToken,
       .e4m3 = true,
       .blocks = 16});
  add({.ranks = 8,
       .tokens = 1,
       .hidden = 7168,
       .experts = 256,
       .layout = kSlots,
       .reduction = kToken,
       .e4m3 = true,
       .blocks = 16});
  for (const DType dtype : {DType::f16, DType::f32}) {
    for (const int hidden : {2048, 51}) {
      add({.ranks = 4, .tokens = 50, .hidden = hidden, .layout = kTokens, .dtype = dtype});
      add({.ranks = 8,
           .tokens = 50,
           .hidden = hidden,
           .layout = kTokens,
           .dtype = dtype,
           .uneven = true,
           .absent = 0.2});
      add({.ranks = 5,
           .tokens = 50,
           .hidden = hidden,
           .layout = kGrouped,
           .alignment = 8,
           .dtype = dtype,
           .duplicates = true,
           .absent = 0.2});
      add({.ranks = 5,
           .tokens = 50,
           .hidden = hidden,
           .layout = kGrouped,
           .dtype = dtype,
           .partials = true,
           .duplicates = true});
      add({.ranks = 8,
           .tokens = 50,
           .hidden = hidden,
           .layout = kSlots,
           .reduction = kToken,
           .dtype = dtype,
           .duplicates = true,
           .absent = 0.2});
    }
  }
  for (const int tokens :
       {16, 300}) {  // the second is planned by several blocks, and in one launch
    add({.ranks = 8,
         .tokens = tokens,
         .hidden = 1024,
         .experts = 256,
         .layout = kSlots,
         .reduction = kToken,
         .e4m3 = true,
         .uneven = tokens > 100,
         .absent = 0.1,
         .blocks = 16});
  }
  add({.ranks = 8, .tokens = 1200, .hidden = 64, .experts = 256, .layout = kGrouped, .blocks = 16});
  add({.ranks = 1, .tokens = 50, .hidden = 640, .layout = kGrouped, .alignment = 4});
  add({.ranks = 8, .tokens = 40, .hidden = 128, .experts = 1025, .layout = kGrouped});
  add({.ranks = 2, .tokens = 50, .hidden = 65536, .topk = 2, .experts = 8, .layout = kTokens});
  return shapes;
}

// A graph of `depth` steps of one set, captured once, replayed for other routings and payloads.
bool replays_are_right(const Shape& shape, bool fused = false) {
  Cluster cluster({.shape = shape});
  cluster.load_set(0);
  CUDA_OK(cudaStreamSynchronize(cluster.stream()));
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  CUDA_OK(cudaStreamBeginCapture(cluster.stream(), cudaStreamCaptureModeGlobal));
  for (int g = 0; g < shape.depth; ++g) {
    if (fused) {
      cluster.plan_dispatch(g);
    } else {
      cluster.plan(g);
      cluster.dispatch(g);
    }
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

// A sum of NaN of any bits is the one NaN.
bool nan_is_canonical(DType dtype) {
  bool good = true;
  for (const Layout layout : {Layout::tokens, Layout::grouped, Layout::slots}) {
    Cluster cluster(
        {.shape = {.ranks = 4,
                   .tokens = 16,
                   .hidden = 256,
                   .layout = layout,
                   .reduction = layout == Layout::slots ? Reduction::by_token : Reduction::by_rank,
                   .dtype = dtype}});
    good = checked_step(cluster, 0, 0, {}, "before NaN") && good;
    cluster.poison_windows();
    cluster.plan(1);
    cluster.dispatch(1);
    cluster.combine(1);
    good = cluster.sums_are_nan() && good;
  }
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
    const bool right = f.cause == static_cast<std::uint32_t>(ErrorCode::timeout) + 1 &&
                       f.blamed == 2 &&
                       f.stage == static_cast<std::uint32_t>(Stage::dispatch_recv) && f.step == 2;
    if (!right) {
      std::printf("FAILED fault of rank %d: cause %u stage %u blamed %u reporter %u step %u\n",
                  rank, f.cause, f.stage, f.blamed, f.reporter, f.step);
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

// One rank does not count: the others name it, whether the plan is a launch of its own or not.
bool plan_faults_are_right() {
  bool good = true;
  for (const bool fused : {false, true}) {
    Cluster cluster({.shape = {.ranks = 3, .tokens = 16, .hidden = 128, .topk = 2, .experts = 8},
                     .deadline_s = 0.02});
    good = checked_step(cluster, 0, 0, {.fused = fused}, "before the fault") && good;
    cluster.launch_ranks = 2;
    if (fused) {
      cluster.plan_dispatch(1);
    } else {
      cluster.plan(1);
    }
    CUDA_OK(cudaStreamSynchronize(cluster.stream()));
    for (int rank = 0; rank < 2; ++rank) {
      const layout::Fault f = cluster.fault(rank);
      if (f.cause == static_cast<std::uint32_t>(ErrorCode::timeout) + 1 && f.blamed == 2 &&
          f.stage == static_cast<std::uint32_t>(Stage::plan) && f.step == 2) {
        continue;
      }
      std::printf("FAILED fault of rank %d: cause %u stage %u blamed %u reporter %u step %u\n",
                  rank, f.cause, f.stage, f.blamed, f.reporter, f.step);
      good = false;
    }
  }
  return good;
}

}  // namespace

int run_checks() {
  int failed = 0, cases = 0;
  for (const Shape& shape : check_shapes()) {
    const std::string name = describe(shape);
    Cluster cluster({.shape = shape});
    bool good = true;
    for (int step = 0; step < 3 * shape.depth + 1; ++step) {
      const StepOptions options{.halves = step % 3 == 1,
                                .fused = step % 3 == 2,
                                .host_sums = step < 3 && shape.hidden * shape.tokens < 300000};
      good = checked_step(cluster, step % shape.sets, step % shape.depth, options, name.c_str()) &&
             good;
    }
    for (int local = 0; local < shape.ranks; ++local) {
      const layout::Fault f = cluster.fault(local);
      if (f.cause == 0) continue;
      std::printf("FAILED %s: rank %d fault cause %u stage %u blamed %u step %u\n", name.c_str(),
                  local, f.cause, f.stage, f.blamed, f.step);
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
  one("graph replay, tokens",
      replays_are_right({.ranks = 8, .hidden = 1024, .layout = Layout::tokens, .sets = 5}));
  one("graph replay, grouped by_rank, filled on arrival",
      replays_are_right({.ranks = 4,
                         .layout = Layout::grouped,
                         .depth = 3,
                         .alignment = 8,
                         .partials = true,
                         .fill = true,
                         .sets = 5}));
  one("one NaN", nan_is_canonical(DType::bf16));
  one("one NaN, f16", nan_is_canonical(DType::f16));
  one("one NaN, f32", nan_is_canonical(DType::f32));
  one("graph replay, slots e4m3", replays_are_right({.ranks = 8,
                                                     .tokens = 16,
                                                     .hidden = 1024,
                                                     .layout = Layout::slots,
                                                     .reduction = Reduction::by_token,
                                                     .e4m3 = true,
                                                     .sets = 5}));
  one("graph replay, slots e4m3, plan and dispatch in one launch",
      replays_are_right({.ranks = 8,
                         .tokens = 100,
                         .hidden = 1024,
                         .experts = 256,
                         .layout = Layout::slots,
                         .reduction = Reduction::by_token,
                         .e4m3 = true,
                         .blocks = 16,
                         .sets = 5},
                        true));
  one("graph replay, grouped, plan and dispatch in one launch",
      replays_are_right(
          {.ranks = 4, .layout = Layout::grouped, .depth = 3, .alignment = 8, .sets = 5}, true));
  one("faults", faults_are_right());
  one("faults of a plan", plan_faults_are_right());
  std::printf("%d of %d cases failed\n", failed, cases);
  return failed == 0 ? 0 : 1;
}

int run_sanitize() {
  bool good = true;
  const std::vector<Shape> shapes = {
      {.ranks = 2, .tokens = 9, .hidden = 512, .topk = 3, .experts = 6, .blocks = 2, .sets = 2},
      {.ranks = 2, .tokens = 9, .hidden = 50, .topk = 3, .experts = 6, .blocks = 2, .sets = 2},
      {.ranks = 2,
       .tokens = 9,
       .hidden = 256,
       .topk = 3,
       .experts = 6,
       .layout = Layout::grouped,
       .alignment = 4,
       .fill = true,
       .blocks = 2,
       .sets = 2},
      {.ranks = 2,
       .tokens = 5,
       .hidden = 512,
       .topk = 3,
       .experts = 6,
       .layout = Layout::slots,
       .reduction = Reduction::by_token,
       .e4m3 = true,
       .blocks = 2,
       .sets = 2},
      {.ranks = 2,
       .tokens = 12,
       .hidden = 256,
       .topk = 3,
       .experts = 6,
       .layout = Layout::slots,
       .reduction = Reduction::by_token,
       .e4m3 = true,
       .blocks = 2,
       .sets = 2},
  };
  for (const Shape& shape : shapes) {
    Cluster cluster({.shape = shape, .deadline_s = 200.0});
    for (int step = 0; step < 4; ++step) {
      good = checked_step(cluster, step % 2, step % 2, {.halves = step == 1, .fused = step >= 2},
                          describe(shape).c_str()) &&
             good;
    }
  }
  std::printf("sanitize: %s\n", good ? "ok" : "FAILED");
  return good ? 0 : 1;
}

}  // namespace wherry::bench
