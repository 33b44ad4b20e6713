// Experts that get too much move, and are replicated, between two steps.
#include "examples.hpp"

using namespace wherry;

namespace {

void run_step(Exchange& exchange, Plan& plan, Tokens& tokens) {
  exchange.plan(tokens.routing(), plan);
  const Received received = exchange.dispatch(plan, tokens.rows());
  const TensorView y = exchange.combine_input(plan);
  run_experts(exchange, received, y);
  exchange.combine(plan, y, tokens.sums());
  tokens.check();
}

void run_rank(Group& group) {
  // Most tokens want expert 0.
  Tokens tokens(group.rank(), 6, 1, 60, 16);
  for (std::size_t t = 0; t < tokens.ids.size(); ++t) {
    if (t % 3 != 0) tokens.ids[t] = 0;
  }
  // [snippet balance]
  // Eight slots for six experts: two may have a replica.
  const Placement start = Placement::from_slots(6, {0, 1, 2, 3, 4, 5, -1, -1}, {0, 2, 4, 6, 8});
  Exchange exchange(group, {.experts = 6,
                            .topk = 1,
                            .hidden = 16,
                            .max_tokens = 64,
                            .dtype = DType::f32,
                            .placement = start});
  Plan plan = exchange.make_plan();
  run_step(exchange, plan, tokens);

  // Every rank knows the loads of all, so every rank finds the same placement.
  const std::vector<double> loads(exchange.loads().begin(), exchange.loads().end());
  const std::vector<Placement> now{exchange.placement()};
  const BalancedLayer better = balance({loads}, {.ranks = 4, .slots = 8}, now).front();
  for (const Move& move : moves(now.front(), better.placement())) {
    static_cast<void>(move);  // copy the weights of move.expert from move.from_slot to move.to_slot
  }
  exchange.set_placement(better.placement());  // all ranks, between the same two plans
  run_step(exchange, plan, tokens);            // the same sums, other ranks compute them
  // [end]
  if (better.imbalance >= imbalance(rank_loads(start, loads)) || better.replicas[0] < 2) {
    throw std::runtime_error("the busiest expert should have got a replica");
  }
}

}  // namespace

int main() { run_threads(4, run_rank); }
