// What a window promises its users: views without copies, reuse of plans, halves that do not wait,
// exchanges that take turns at one window.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "support/layer.hpp"

namespace wherry::test {
namespace {

TEST(Window, CallerTensorsGetTheReceivedRowsAndGiveTheResults) {
  const Batch batch = make_batch(15, 3, 6, 2, 8, 61);
  run_threads(3, [&](Group& group) {
    Exchange exchange(group, config_for(batch));
    Plan plan = exchange.make_plan();
    exchange.plan(batch.routing_of(group.rank()), plan);
    std::vector<Bf16> x = tokens_of<Bf16>(batch, group.rank());
    std::vector<Bf16> out(x.size());
    const std::int64_t rows = plan.to_host().slot_begin.back();
    std::vector<Bf16> mine(static_cast<std::size_t>((rows + 2) * 8));
    const Received r = exchange.dispatch(plan, view(x, 8), {.out = view(mine, 8)});
    expect(r.rows.data == mine.data() && r.rows.rows == rows,
           "the rows are not in the caller's memory");
    std::vector<Bf16> y(static_cast<std::size_t>(rows * 8));
    apply_experts<Bf16>(exchange, r, view(y, 8));
    exchange.combine(plan, view(y, 8), view(out, 8));
    expect_dense<Bf16>(exchange, batch, out);
  });
}

TEST(Window, APlanServesTheForwardPassItsRecomputationAndTheBackwardPass) {
  const Batch batch = make_batch(15, 3, 6, 2, 8, 62);
  run_threads(3, [&](Group& group) {
    Exchange exchange(group, config_for(batch));
    Plan plan = exchange.make_plan();
    exchange.plan(batch.routing_of(group.rank()), plan);
    std::vector<Bf16> x = tokens_of<Bf16>(batch, group.rank());
    for (int pass = 0; pass < 4; ++pass) {  // forward, recomputed dispatch, backward twice
      const Received r = exchange.dispatch(plan, view(x, 8));
      if (pass == 1) {
        exchange.release(r);
        continue;
      }
      std::vector<Bf16> out(x.size());
      const TensorView y = exchange.combine_input(plan);
      apply_experts<Bf16>(exchange, r, y);
      exchange.combine(plan, y, view(out, 8));
      expect_dense<Bf16>(exchange, batch, out);
    }
  });
}

TEST(Window, BeginReturnsWhileAPeerHasNotEvenCome) {
  const Batch batch = make_batch(12, 3, 6, 2, 8, 63);
  std::atomic<bool> awake{false};
  run_threads(3, [&](Group& group) {
    Exchange exchange(group, config_for(batch));
    Plan plan = exchange.make_plan();
    exchange.plan(batch.routing_of(group.rank()), plan);
    std::vector<Bf16> x = tokens_of<Bf16>(batch, group.rank());
    std::vector<Bf16> out(x.size());
    if (group.rank() == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
      awake = true;
    }
    const auto start = std::chrono::steady_clock::now();
    auto dispatch = exchange.dispatch_begin(plan, view(x, 8));
    const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - start;
    // Said, not asserted: a test must not fail because the machine is busy.
    if (group.rank() == 0)
      fmt::print("dispatch_begin took {:.0f} us while a peer slept\n", took.count());
    expect(group.rank() == 1 || !awake, "dispatch_begin waited for the rank that slept");
    const Received r = dispatch.finish();
    expect(awake, "finish did not wait");
    const TensorView y = exchange.combine_input(plan);
    apply_experts<Bf16>(exchange, r, y);
    exchange.combine(plan, y, view(out, 8));
    expect_dense<Bf16>(exchange, batch, out);
  });
}

TEST(Window, TokenRowsSendOneRowForEachRankAndTheCountersSaySo) {
  const Batch batch = make_batch(40, 4, 8, 4, 16, 64);
  for (const Layout layout : {Layout::tokens, Layout::grouped}) {
    ExchangeConfig config = config_for(batch);
    config.layout = layout;
    config.reduction = Reduction::by_rank;
    config.sum_at = SumAt::expert;
    run_threads(4, [&](Group& group) {
      Exchange exchange(group, config);
      static_cast<void>(run_layer<Bf16>(exchange, batch));
      // Counted from the routing, not from the plan.
      std::int64_t rows = 0;
      std::int64_t link = 0;
      std::int64_t token_link = 0;
      const Routing routing = batch.routing_of(group.rank());
      for (std::int64_t t = 0; t < routing.tokens; ++t) {
        std::array<bool, 4> seen{};
        for (int k = 0; k < routing.topk; ++k) {
          const auto rank = static_cast<std::size_t>(routing.id(t, k) / 2);  // two experts a rank
          const bool away = static_cast<int>(rank) != group.rank();
          const bool first = !std::exchange(seen[rank], true);
          rows += layout == Layout::grouped || first ? 1 : 0;
          link += away && (layout == Layout::grouped || first) ? 1 : 0;
          token_link += away && first ? 1 : 0;
        }
      }
      const Traffic traffic = exchange.traffic();
      expect(traffic.dispatch_rows == rows && traffic.dispatch_bytes == rows * 32, "dispatch rows");
      expect(traffic.dispatch_link_bytes == link * 32, "dispatch bytes between ranks");
      expect(traffic.combine_link_bytes == token_link * 32, "by_rank brings home one row a rank");
    });
  }
}

// A large exchange with token rows and a small one with slots, at one window.
std::vector<ExchangeConfig> two_configs(const Batch& prefill, const Batch& decode) {
  ExchangeConfig large = config_for(prefill);
  large.layout = Layout::tokens;
  large.reduction = Reduction::by_rank;
  ExchangeConfig small = config_for(decode);
  small.layout = Layout::slots;
  small.depth = 2;
  return {large, small};
}

TEST(Window, ExchangesThatShareAWindowTakeTurns) {
  const Batch prefill = make_batch(60, 3, 6, 2, 32, 65);
  const Batch decode = make_batch(6, 3, 6, 2, 32, 66);
  const std::vector<ExchangeConfig> configs = two_configs(prefill, decode);
  run_threads(3, [&](Group& group) {
    std::vector<Exchange> exchanges = make_sharing_exchanges(group, configs);
    for (int round = 0; round < 300; ++round) {
      for (int i = 0; i < 1 + round % 2; ++i) {
        expect_dense<Bf16>(exchanges[0], prefill, run_layer<Bf16>(exchanges[0], prefill));
      }
      for (int i = 0; i < 1 + round % 3; ++i) {
        expect_dense<Bf16>(exchanges[1], decode, run_layer<Bf16>(exchanges[1], decode));
      }
    }
  });
}

TEST(Window, ADispatchLeftUncombinedIsLostWhenTheWindowIsHandedOver) {
  const Batch prefill = make_batch(60, 3, 6, 2, 32, 67);
  const Batch decode = make_batch(6, 3, 6, 2, 32, 68);
  const std::vector<ExchangeConfig> configs = two_configs(prefill, decode);
  run_threads(3, [&](Group& group) {
    std::vector<Exchange> exchanges = make_sharing_exchanges(group, configs);
    Plan plan = exchanges[0].make_plan();
    exchanges[0].plan(prefill.routing_of(group.rank()), plan);
    std::vector<Bf16> x = tokens_of<Bf16>(prefill, group.rank());
    static_cast<void>(exchanges[0].dispatch(plan, view(x, 32)));
    expect_dense<Bf16>(exchanges[1], decode, run_layer<Bf16>(exchanges[1], decode));
    try {
      static_cast<void>(exchanges[0].combine_input(plan));
      expect(false, "rows that were overwritten could be combined");
    } catch (const Error& error) {
      expect(error.code() == ErrorCode::misuse, error.what());
    }
    expect_dense<Bf16>(exchanges[0], prefill, run_layer<Bf16>(exchanges[0], prefill));
  });
}

}  // namespace
}  // namespace wherry::test
