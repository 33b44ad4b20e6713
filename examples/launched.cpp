// A rank that a launcher has started: mpirun -n 4 example_launched, torchrun, srun; or by hand, with
// WHERRY_RANK and WHERRY_SIZE.
#include "examples.hpp"

using namespace wherry;

// [snippet launched]
int main() {
  try {
    Group group = Group::from_environment(Seconds(30));
    Exchange exchange(group, {.experts = 6,
                              .topk = 2,
                              .hidden = 16,
                              .max_tokens = 32,
                              .dtype = DType::f32,
                              .deadline = Seconds(30)});
    Plan plan = exchange.make_plan();
    Tokens tokens(group.rank(), 6, 2, 20, 16);
    exchange.plan(tokens.routing(), plan);
    const Received received = exchange.dispatch(plan, tokens.rows());
    const TensorView y = exchange.combine_input(plan);
    run_experts(exchange, received, y);
    exchange.combine(plan, y, tokens.sums());
    tokens.check();
    std::printf("rank %d of %d: right, over %.*s\n", group.rank(), group.size(),
                static_cast<int>(exchange.fabric().size()), exchange.fabric().data());
  } catch (const Error& error) {  // what() names code, stage, rank and the peer to blame
    std::fprintf(stderr, "%s\n", error.what());
    return remedy(error.code()) == Remedy::replace_the_peer ? 3 : 1;
  }
}
// [end]
