// Every kernel set against the reference set, bit for bit, on rows of arbitrary bits.
#include <gtest/gtest.h>

#include <random>

#include "kernels/stages.hpp"
#include "support/layer.hpp"

namespace wherry::test {
namespace {

struct Shape {
  Layout layout;
  Reduction reduction;
  DType dtype;
  std::int64_t hidden;
  std::int64_t tokens;
  std::optional<SumAt> sum_at = std::nullopt;
  Wire wire = Wire::same;  // both ways
};

// Any bits: NaN with payloads, infinities, subnormals, -0.
std::vector<std::byte> random_bits(std::size_t bytes, unsigned seed) {
  std::mt19937_64 random(seed);
  std::vector<std::byte> data((bytes + 7) / 8 * 8);
  for (std::size_t i = 0; i < data.size(); i += 8) {
    const std::uint64_t bits = random();
    std::memcpy(data.data() + i, &bits, 8);
  }
  return data;
}

// Two ranks send random rows, return random results and add a random addend; all outputs in a row.
std::vector<std::byte> run(const Shape& shape, std::string_view kernels) {
  const Batch batch = make_batch(shape.tokens, 2, 7, 3, shape.hidden, 51, 0.2);
  const std::int64_t row_bytes = shape.hidden * dtype_bytes(shape.dtype);
  std::vector<std::byte> all(static_cast<std::size_t>(batch.tokens() * row_bytes));
  ExchangeConfig config = config_for(batch, shape.dtype);
  config.layout = shape.layout;
  config.reduction = shape.reduction;
  config.sum_at = shape.sum_at;
  config.dispatch_wire = shape.wire;
  config.combine_wire = shape.wire;
  config.kernels = kernels;
  config.num_threads = 2;
  run_threads(2, [&](Group& group) {
    Exchange exchange(group, config);
    expect(exchange.kernels() == kernels, "another kernel set ran");
    const std::int64_t tokens = batch.tokens_of(group.rank());
    const auto seed = static_cast<unsigned>(group.rank());
    const auto bytes = static_cast<std::size_t>(tokens * row_bytes);
    const std::vector<std::byte> x = random_bits(bytes, seed + 1);
    const std::vector<std::byte> addend = random_bits(bytes, seed + 10);
    Plan plan = exchange.make_plan();
    exchange.plan(batch.routing_of(group.rank()), plan);
    const Received received =
        exchange.dispatch(plan, {x.data(), shape.dtype, tokens, shape.hidden});
    TensorView y;
    y.dtype = shape.dtype;
    y.rows = received.rows.rows;
    y.cols = shape.hidden;
    std::vector<std::byte> results(static_cast<std::size_t>(y.rows * row_bytes));
    y.data = results.data();
    if (shape.wire == Wire::same) y = exchange.combine_input(plan);
    for (std::int64_t row = 0; row < y.rows; ++row) {
      const auto bits =
          random_bits(static_cast<std::size_t>(row_bytes), seed + 100 + static_cast<unsigned>(row));
      std::memcpy(y.row(row), bits.data(), static_cast<std::size_t>(row_bytes));
    }
    TensorView out;
    out.data = all.data() + batch.token_begin[static_cast<std::size_t>(group.rank())] * row_bytes;
    out.dtype = shape.dtype;
    out.rows = tokens;
    out.cols = shape.hidden;
    exchange.combine(plan, y, out, {.addend = {addend.data(), shape.dtype, tokens, shape.hidden}});
  });
  return all;
}

std::vector<Shape> shapes() {
  std::vector<Shape> all;
  for (const DType dtype : {DType::bf16, DType::f16, DType::f32, DType::f64}) {
    for (const std::int64_t hidden : {1, 63, 64, 257, 520}) {
      all.push_back({Layout::grouped, Reduction::by_token, dtype, hidden, 9});
      all.push_back({Layout::grouped, Reduction::by_rank, dtype, hidden, 9});
      all.push_back({Layout::grouped, Reduction::by_rank, dtype, hidden, 9, SumAt::expert});
    }
    all.push_back({Layout::tokens, Reduction::by_rank, dtype, 200, 9});
    all.push_back({Layout::slots, Reduction::by_rank, dtype, 200, 9});
    // More than the 4 MiB a rank from which stores are streamed: aligned rows and rows that are not.
    const std::int64_t tokens = 3400 * 2 / dtype_bytes(dtype);
    all.push_back({Layout::grouped, Reduction::by_rank, dtype, 1024, tokens});
    all.push_back({Layout::grouped, Reduction::by_rank, dtype, 1024, tokens, SumAt::expert});
    all.push_back({Layout::grouped, Reduction::by_token, dtype, 1032, tokens});
  }
  for (const DType dtype : {DType::bf16, DType::f32}) {
    for (const Wire wire : {Wire::f16, Wire::e4m3_block128, Wire::mxfp8_e4m3, Wire::int8_token}) {
      all.push_back({Layout::grouped, Reduction::by_token, dtype, 257, 9, {}, wire});
      all.push_back({Layout::grouped, Reduction::by_rank, dtype, 520, 9, {}, wire});
      all.push_back({Layout::tokens, Reduction::by_rank, dtype, 200, 9, {}, wire});
    }
  }
  return all;
}

TEST(Kernels, EverySetEqualsTheReferenceBitForBit) {
  ASSERT_GE(kernels::available().size(), 1U);
  for (const Shape& shape : shapes()) {
    const std::vector<std::byte> want = run(shape, "reference");
    for (const kernels::KernelSet& set : kernels::available()) {
      EXPECT_TRUE(run(shape, set.name) == want)
          << set.name << " " << name(shape.layout) << " " << name(shape.reduction) << " "
          << name(shape.dtype) << " hidden " << shape.hidden;
    }
  }
}

TEST(Kernels, ASetThatDoesNotExistIsRefusedWithTheNamesThatDo) {
  const Batch batch = make_batch(4, 1, 4, 2, 8, 52);
  ExchangeConfig config = config_for(batch);
  config.kernels = "abacus";
  try {
    run_threads(1, [&](Group& group) { const Exchange exchange(group, config); });
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("reference"), std::string::npos) << error.what();
  }
}

TEST(Kernels, TheEnvironmentPinsASet) {
  const Batch batch = make_batch(4, 1, 4, 2, 8, 53);
  setenv("WHERRY_KERNELS", "reference", 1);
  run_threads(1, [&](Group& group) {
    const Exchange exchange(group, config_for(batch));
    expect(exchange.kernels() == "reference", "WHERRY_KERNELS was ignored");
  });
  setenv("WHERRY_KERNELS", "cuda_copy", 1);  // for another device
  run_threads(1, [&](Group& group) {
    const Exchange exchange(group, config_for(batch));
    expect(exchange.kernels() == kernels::available().front().name, "not the best");
  });
  unsetenv("WHERRY_KERNELS");
}

}  // namespace
}  // namespace wherry::test
