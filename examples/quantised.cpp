// Rows travel as 8-bit floats with a scale for every 128 elements; results come home as they are.
#include "examples.hpp"

using namespace wherry;

namespace {

void run_rank(Group& group) {
  Tokens tokens(group.rank(), 8, 2, 50, 256);
  // [snippet quantised]
  Exchange exchange(group, {.experts = 8,
                            .topk = 2,
                            .hidden = 256,
                            .max_tokens = 64,
                            .dtype = DType::f32,
                            .dispatch_wire = Wire::e4m3_block128});
  Plan plan = exchange.make_plan();
  exchange.plan(tokens.routing(), plan);

  // Either: experts that take 8-bit floats read payload and scales where they arrived.
  const Received narrow = exchange.dispatch(plan, tokens.rows());
  const WireFormat& wire = narrow.wire;  // narrow.rows: wire.payload_bytes a row; narrow.scales
  exchange.release(narrow);              // no combine follows

  // Or: dispatch converts them back, into memory of yours.
  const std::int64_t rows = plan.to_host().slot_begin.back();
  std::vector<float> wide(static_cast<std::size_t>(rows * 256));
  const TensorView out{{wide.data(), DType::f32, rows, 256}};
  const Received received = exchange.dispatch(plan, tokens.rows(), {.out = out});
  const TensorView y = exchange.combine_input(plan);
  run_experts(exchange, received, y);
  exchange.combine(plan, y, tokens.sums());
  // [end]
  if (wire.payload_bytes != 256) throw std::runtime_error("a row should take one byte an element");
  tokens.check(0.0625F);  // e4m3 keeps three bits of each element
}

}  // namespace

int main() { run_threads(4, run_rank); }
