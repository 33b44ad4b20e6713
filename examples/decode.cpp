// Decode: two micro-batches in turns, so that one is on its way while the other is computed on.
#include <array>

#include "examples.hpp"

using namespace wherry;

namespace {

void run_rank(Group& group) {
  // [snippet decode]
  // Rows lie in [slots_local, rows_per_slot, hidden]; two dispatches may be under way at once.
  Exchange exchange(group, {.experts = 8,
                            .topk = 2,
                            .hidden = 32,
                            .max_tokens = 16,
                            .dtype = DType::f32,
                            .layout = Layout::slots,
                            .depth = 2});
  std::array<Plan, 2> plans{exchange.make_plan(), exchange.make_plan()};
  std::array<Tokens, 2> batch{Tokens(group.rank(), 8, 2, 16, 32),
                              Tokens(group.rank(), 8, 2, 9, 32)};

  exchange.plan(batch[0].routing(), plans[0]);
  exchange.plan(batch[1].routing(), plans[1]);
  auto dispatch0 = exchange.dispatch_begin(plans[0], batch[0].rows());  // returns at once
  auto dispatch1 = exchange.dispatch_begin(plans[1], batch[1].rows());
  const Received r0 = dispatch0.finish();  // waits for the rows of batch 0
  const TensorView y0 = exchange.combine_input(plans[0]);
  run_experts(exchange, r0, y0);  // meanwhile batch 1 arrives
  auto combine0 = exchange.combine_begin(plans[0], y0, batch[0].sums());
  const Received r1 = dispatch1.finish();
  const TensorView y1 = exchange.combine_input(plans[1]);
  run_experts(exchange, r1, y1);  // meanwhile the results of batch 0 come home
  auto combine1 = exchange.combine_begin(plans[1], y1, batch[1].sums());
  combine0.finish();
  combine1.finish();
  // [end]
  for (const Tokens& tokens : batch) tokens.check();
}

}  // namespace

int main() { run_threads(4, run_rank); }
