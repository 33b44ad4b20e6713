// Thousands of steps with one process a rank, no barrier between them and random delays on each
// rank, bit by bit the same. Start CUDA MPS first.
#include <vector>

#include "processes.hpp"
#include "step.hpp"

namespace wherry::bench {

namespace {

// Halves, two generations in flight, no barrier: combine(t - 1) comes after dispatch(t).
int soak_rank(int rank, SharedPage& page, const Shape& shape, int steps) {
  Cluster cluster(
      {.shape = shape, .first_rank = rank, .local_ranks = 1, .gather = page.gather(rank)});
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
    const bool fused = step % 3 == 2;
    if (fused) {
      cluster.plan_dispatch(generation);
      cluster.experts(generation, set);
      if (shape.depth > 1 && step > 0) combine(step - 1);
      continue;
    }
    cluster.plan(generation,
                 step % 2 == 0 ? kernels::cuda::CountStep::both : kernels::cuda::CountStep::send);
    if (step % 2 != 0) cluster.plan(generation, kernels::cuda::CountStep::recv);
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
    std::printf("rank %d: fault cause %u stage %u blamed %u step %u\n", rank, fault.cause,
                fault.stage, fault.blamed, fault.step);
  }
  const bool good = report("soak", found, true, true) && fault.cause == 0;
  page.barrier();  // windows stay until all are done
  return good ? 0 : 1;
}

}  // namespace

int run_soak(int steps) {
  bool good = true;
  const std::vector<Shape> shapes = {
      {.ranks = 8,
       .tokens = 48,
       .hidden = 1024,
       .layout = Layout::tokens,
       .depth = 2,
       .blocks = 4,
       .sets = 5},
      {.ranks = 8,
       .tokens = 48,
       .hidden = 1024,
       .layout = Layout::tokens,
       .depth = 1,
       .blocks = 4,
       .sets = 5},
      {.ranks = 4,
       .tokens = 64,
       .hidden = 512,
       .layout = Layout::grouped,
       .depth = 2,
       .alignment = 8,
       .partials = true,
       .fill = true,
       .uneven = true,
       .absent = 0.2,
       .blocks = 4,
       .sets = 5},
      {.ranks = 8,
       .tokens = 32,
       .hidden = 512,
       .layout = Layout::grouped,
       .depth = 3,
       .duplicates = true,
       .blocks = 4,
       .sets = 5},
      {.ranks = 8,
       .tokens = 16,
       .hidden = 2048,
       .layout = Layout::slots,
       .reduction = Reduction::by_token,
       .depth = 2,
       .e4m3 = true,
       .blocks = 4,
       .sets = 5},
  };
  for (const Shape& shape : shapes) {
    const bool right = run_processes(
        shape.ranks,
        [&](int rank, SharedPage& page) { return soak_rank(rank, page, shape, steps); },
        [](const SharedPage&) {});
    std::printf("%s soak of %d steps: %s\n", right ? "ok    " : "FAILED", steps,
                describe(shape).c_str());
    good = good && right;
  }
  return good ? 0 : 1;
}

}  // namespace wherry::bench
