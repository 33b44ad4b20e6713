// One step of a layer over four ranks: the smallest useful program.
#include "examples.hpp"

using namespace wherry;

// [snippet step]
// One step of an MoE layer on this rank; every rank of the group calls it at the same time.
void layer_step(Exchange& exchange, Plan& plan, const Routing& routing, ConstTensorView x,
                TensorView out) {
  exchange.plan(routing, plan);                   // which row goes where, from everyone's counts
  const Received r = exchange.dispatch(plan, x);  // rows of my experts, one segment a slot
  const TensorView y = exchange.combine_input(plan);  // results go where their homes read them
  const int first = exchange.placement().slot_begin()[static_cast<std::size_t>(exchange.rank())];
  for (std::size_t s = 0; s < r.slot_counts.size(); ++s) {
    const int expert = exchange.placement().slot_to_expert()[static_cast<std::size_t>(first) + s];
    run_expert(expert, r.slot_begin[s], r.slot_counts[s], r.rows, y);  // yours: y[row] = f(x[row])
  }
  exchange.combine(plan, y, out);  // out[t] = sum of weight * y over the experts of token t
}

void run_rank(Group& group) {
  Exchange exchange(
      group, {.experts = 16, .topk = 2, .hidden = 64, .max_tokens = 128, .dtype = DType::f32});
  Plan plan = exchange.make_plan();  // lives as long as you like; filled again by each step
  for (int step = 0; step < 3; ++step) {
    Tokens tokens(group.rank(), 16, 2, 100 + step, 64);  // x, and ids and weights of your router
    layer_step(exchange, plan, tokens.routing(), tokens.rows(), tokens.sums());
    tokens.check();
  }
}

// Ranks are threads here; run_processes() and Group::from_environment() have them as processes.
int main() { run_threads(4, run_rank); }
// [end]
