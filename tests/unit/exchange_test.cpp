// The smallest proofs: ranks as threads, the reference kernels, the dense loop.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <limits>
#include <mutex>
#include <numeric>

#include "support/layer.hpp"

namespace wherry::test {
namespace {

using ::testing::HasSubstr;

TEST(Exchange, EqualsTheDenseLoopForTwoRanksAndWeightsThatDoNotSumToOne) {
  const Batch batch = make_batch(5, 2, 4, 2, 8, 1);
  run_threads(2, [&](Group& group) { run_and_verify<Bf16>(group, batch, config_for(batch)); });
}

TEST(Exchange, AFlippedBitOfOneReceivedRowChangesExactlyThatToken) {
  const Batch batch = make_batch(9, 2, 4, 2, 8, 2);
  std::mutex mutex;
  std::vector<std::int64_t> wrong;
  std::int64_t flipped = -1;
  run_threads(2, [&](Group& group) {
    Exchange exchange(group, config_for(batch));
    Plan plan = exchange.make_plan();
    exchange.plan(batch.routing_of(group.rank()), plan);
    std::vector<Bf16> x = tokens_of<Bf16>(batch, group.rank());
    std::vector<Bf16> out(x.size());
    const Received received = exchange.dispatch(plan, view(x, batch.hidden));
    if (group.rank() == 1) {
      // Which token the row belongs to is read off its payload.
      Bf16* row = received.rows.row<Bf16>(0);
      for (std::int64_t t = 0; t < batch.tokens(); ++t) {
        if (token_value<Bf16>(t, 0).bits == row[0].bits &&
            token_value<Bf16>(t, 3).bits == row[3].bits)
          flipped = t;
      }
      row[3].bits ^= 0x40;
    }
    const TensorView y = exchange.combine_input(plan);
    apply_experts<Bf16>(exchange, received, y);
    exchange.combine(plan, y, view(out, batch.hidden));
    for (std::int64_t t = 0; t < batch.tokens_of(group.rank()); ++t) {
      const std::int64_t token = batch.token_begin[static_cast<std::size_t>(group.rank())] + t;
      bool same = true;
      for (std::int64_t h = 0; h < batch.hidden; ++h) {
        same = same && out[static_cast<std::size_t>(t * batch.hidden + h)].bits ==
                           dense_by_token<Bf16>(batch, token, h).bits;
      }
      const std::scoped_lock lock(mutex);
      if (!same) wrong.push_back(token);
    }
  });
  ASSERT_GE(flipped, 0);
  EXPECT_EQ(wrong, std::vector<std::int64_t>{flipped});
}

TEST(Exchange, EveryLegalPairOfLayoutAndReductionEqualsItsDenseRule) {
  for (const LegalPair& pair : kLegalPairs) {
    for (const int ranks : {1, 2, 3, 4, 7}) {
      const Batch batch = make_batch(23, ranks, 9, 3, 24, 3, 0.2);
      ExchangeConfig config = config_for(batch);
      config.layout = pair.layout;
      config.reduction = pair.reduction;
      config.sum_at = pair.sum_at;
      SCOPED_TRACE(
          fmt::format("{} {} on {} ranks", name(pair.layout), name(pair.reduction), ranks));
      // fp32 rows show every bit of the sum, bf16 rows the one rounding.
      EXPECT_NO_THROW(run_threads(ranks, [&](Group& group) {
        run_and_verify<Bf16>(group, batch, config);
        run_and_verify<float>(group, batch, config);
      }));
    }
  }
}

TEST(Exchange, SumsF16F32AndF64RowsByTheSameRule) {
  const Batch batch = make_batch(17, 3, 5, 2, 7, 4);
  run_threads(3, [&](Group& group) {
    run_and_verify<_Float16>(group, batch, config_for(batch));
    run_and_verify<float>(group, batch, config_for(batch));
    run_and_verify<double>(group, batch, config_for(batch));
  });
}

TEST(Exchange, PadsEachSlotToTheAlignmentWithZeroRows) {
  const Batch batch = make_batch(11, 2, 4, 2, 8, 5);
  ExchangeConfig config = config_for(batch);
  config.alignment = 4;
  run_threads(2, [&](Group& group) {
    Exchange exchange(group, config);
    for (int repeat = 0; repeat < 3; ++repeat) {
      Plan plan = exchange.make_plan();
      exchange.plan(batch.routing_of(group.rank()), plan);
      std::vector<Bf16> x = tokens_of<Bf16>(batch, group.rank());
      std::vector<Bf16> out(x.size());
      const Received r = exchange.dispatch(plan, view(x, batch.hidden));
      for (std::size_t s = 0; s < r.slot_counts.size(); ++s) {
        expect(r.slot_begin[s] % 4 == 0, "a segment does not start on the alignment");
        for (std::int64_t row = r.slot_begin[s] + r.slot_counts[s]; row < r.slot_begin[s + 1];
             ++row) {
          for (std::int64_t h = 0; h < batch.hidden; ++h)
            expect(r.rows.row<Bf16>(row)[h].bits == 0, "padding not zero");
        }
      }
      const TensorView y = exchange.combine_input(plan);
      apply_experts<Bf16>(exchange, r, y);
      exchange.combine(plan, y, view(out, batch.hidden));
      expect_dense<Bf16>(exchange, batch, out);
      std::memset(r.rows.data, 0xFF,
                  static_cast<std::size_t>(r.rows.rows * r.rows.pitch()));  // for the next round
    }
  });
}

TEST(Exchange, KeepsTwoStepsInFlightWithDepthTwo) {
  const Batch first = make_batch(13, 3, 6, 2, 16, 6);
  const Batch second = make_batch(19, 3, 6, 2, 16, 7);
  ExchangeConfig config = config_for(first);
  config.max_tokens = std::max(first.max_tokens(), second.max_tokens());
  config.depth = 2;
  run_threads(3, [&](Group& group) {
    Exchange exchange(group, config);
    Plan plan_a = exchange.make_plan();
    Plan plan_b = exchange.make_plan();
    for (int repeat = 0; repeat < 20; ++repeat) {
      exchange.plan(first.routing_of(group.rank()), plan_a);
      exchange.plan(second.routing_of(group.rank()), plan_b);
      std::vector<Bf16> xa = tokens_of<Bf16>(first, group.rank());
      std::vector<Bf16> xb = tokens_of<Bf16>(second, group.rank());
      std::vector<Bf16> out_a(xa.size());
      std::vector<Bf16> out_b(xb.size());
      auto dispatch_a = exchange.dispatch_begin(plan_a, view(xa, 16));
      auto dispatch_b = exchange.dispatch_begin(plan_b, view(xb, 16));
      const Received received_a = dispatch_a.finish();
      const TensorView ya = exchange.combine_input(plan_a);
      apply_experts<Bf16>(exchange, received_a, ya);
      auto combine_a = exchange.combine_begin(plan_a, ya, view(out_a, 16));
      const Received received_b = dispatch_b.finish();
      const TensorView yb = exchange.combine_input(plan_b);
      apply_experts<Bf16>(exchange, received_b, yb);
      auto combine_b = exchange.combine_begin(plan_b, yb, view(out_b, 16));
      combine_b.finish();
      combine_a.finish();
      expect_dense<Bf16>(exchange, first, out_a);
      expect_dense<Bf16>(exchange, second, out_b);
    }
  });
}

TEST(Exchange, RefusesMoreStepsInFlightThanItsDepthAndStaysUsable) {
  const Batch batch = make_batch(8, 2, 4, 2, 8, 8);
  run_threads(2, [&](Group& group) {
    Exchange exchange(group, config_for(batch));
    Plan plan = exchange.make_plan();
    exchange.plan(batch.routing_of(group.rank()), plan);
    std::vector<Bf16> x = tokens_of<Bf16>(batch, group.rank());
    auto handle = exchange.dispatch_begin(plan, view(x, 8));
    try {
      static_cast<void>(exchange.dispatch_begin(plan, view(x, 8)));
      expect(false, "the second dispatch was accepted");
    } catch (const Error& error) {
      expect(error.code() == ErrorCode::misuse, error.what());
    }
    handle.finish();
    std::vector<Bf16> out(x.size());
    const TensorView y = exchange.combine_input(plan);
    std::memset(y.data, 0, static_cast<std::size_t>(y.rows * y.pitch()));
    exchange.combine(plan, y, view(out, 8));
    expect_dense<Bf16>(exchange, batch, run_layer<Bf16>(exchange, batch));
  });
}

TEST(Exchange, UnpairedDispatchesFreeTheirGenerationByReleaseOrOnEntry) {
  const Batch batch = make_batch(12, 3, 5, 2, 8, 9);
  run_threads(3, [&](Group& group) {
    Exchange exchange(group, config_for(batch));
    Plan plan = exchange.make_plan();
    exchange.plan(batch.routing_of(group.rank()), plan);
    std::vector<Bf16> x = tokens_of<Bf16>(batch, group.rank());
    for (int step = 0; step < 30; ++step) {
      const Received r = exchange.dispatch(plan, view(x, 8));
      if (step % 3 == 0) exchange.release(r);
      if (step % 3 == 1) {
        std::vector<Bf16> out(x.size());
        const TensorView y = exchange.combine_input(plan);
        apply_experts<Bf16>(exchange, r, y);
        exchange.combine(plan, y, view(out, 8));
        expect_dense<Bf16>(exchange, batch, out);
      }
    }
  });
}

TEST(Exchange, OneRanksBadRoutingIsAnErrorOnEveryRankAndTheExchangeGoesOn) {
  const Batch batch = make_batch(12, 3, 5, 2, 8, 10);
  std::atomic<int> errors{0};
  run_threads(3, [&](Group& group) {
    Exchange exchange(group, config_for(batch));
    Batch bad = batch;
    const std::int64_t first = bad.token_begin[1] * bad.topk;
    bad.ids[static_cast<std::size_t>(first) + 3] = 5;
    Plan plan = exchange.make_plan();
    try {
      exchange.plan(bad.routing_of(group.rank()), plan);
    } catch (const Error& error) {
      expect(error.code() == ErrorCode::bad_routing && error.peer() == 1, error.what());
      expect(error.message() == "ids[1, 1] is 5; allowed are 0..4 and -1 for no expert",
             error.what());
      ++errors;
    }
    expect_dense<Bf16>(exchange, batch, run_layer<Bf16>(exchange, batch));
  });
  EXPECT_EQ(errors, 3);
}

TEST(Exchange, DifferentConfigurationsAreAnErrorOnEveryRankNamingFieldAndValues) {
  const Batch batch = make_batch(12, 3, 5, 2, 8, 11);
  std::atomic<int> errors{0};
  run_threads(3, [&](Group& group) {
    ExchangeConfig config = config_for(batch);
    if (group.rank() == 2) config.hidden = 16;
    try {
      const Exchange exchange(group, config);
    } catch (const Error& error) {
      expect(error.code() == ErrorCode::config_mismatch, error.what());
      expect(error.message() == "hidden is 8 on rank 0 and 16 on rank 2", error.what());
      ++errors;
    }
  });
  EXPECT_EQ(errors, 3);
}

TEST(Exchange, AWrongShapeOnOneRankEndsTheCallOnAllOfThem) {
  const Batch batch = make_batch(12, 3, 5, 2, 8, 12);
  std::atomic<int> errors{0};
  run_threads(3, [&](Group& group) {
    Exchange exchange(group, config_for(batch));
    Plan plan = exchange.make_plan();
    exchange.plan(batch.routing_of(group.rank()), plan);
    std::vector<Bf16> x = tokens_of<Bf16>(batch, group.rank());
    TensorView view_x = view(x, 8);
    if (group.rank() == 0) view_x.rows -= 1;
    try {
      static_cast<void>(exchange.dispatch(plan, view_x));
    } catch (const Error& error) {
      expect(error.code() == ErrorCode::bad_argument && error.stage() == Stage::dispatch_send,
             error.what());
      ++errors;
    }
  });
  EXPECT_EQ(errors, 3);
}

TEST(Exchange, NumbersNoWindowCanHaveAreRefusedByName) {
  constexpr auto kMost = std::numeric_limits<std::int64_t>::max();
  const auto refusal = [](auto change) {
    ExchangeConfig config = config_for(make_batch(20, 4, 4, 2, 8, 13));
    change(config);
    try {
      static_cast<void>(config.window_bytes(4));
    } catch (const Error& error) {
      return error.code() == ErrorCode::bad_argument ? error.message() : error.what();
    }
    return std::string("accepted");
  };
  EXPECT_THAT(refusal([](auto& c) { c.max_tokens = kMost; }), HasSubstr("max_tokens is 9223"));
  EXPECT_THAT(refusal([](auto& c) { c.hidden = kMost; }), HasSubstr("hidden is 9223"));
  EXPECT_THAT(refusal([](auto& c) { c.alignment = std::numeric_limits<int>::max(); }),
              HasSubstr("rows could arrive at a rank"));
  EXPECT_THAT(refusal([](auto& c) {
                c.hidden = 1 << 30;
                c.max_tokens = 1 << 26;
                c.depth = 16;
              }),
              HasSubstr("the window would have"));
  // These are limits only: more than can come is no more than can come.
  EXPECT_EQ(refusal([](auto& c) { c.receive_rows = kMost; }), "accepted");
  EXPECT_EQ(refusal([](auto& c) {
              c.layout = Layout::slots;
              c.rows_per_slot = kMost;
            }),
            "accepted");
}

TEST(Exchange, OverflowIsAnErrorOnEveryRankOrDropsTheLastRowsAndCountsThem) {
  const Batch batch = make_batch(20, 2, 4, 2, 8, 13);
  for (const Overflow overflow : {Overflow::error, Overflow::drop}) {
    ExchangeConfig config = config_for(batch);
    config.receive_rows = 12;
    config.overflow = overflow;
    std::atomic<int> errors{0};
    std::atomic<std::int64_t> dropped{0};
    run_threads(2, [&](Group& group) {
      Exchange exchange(group, config);
      Plan plan = exchange.make_plan();
      try {
        exchange.plan(batch.routing_of(group.rank()), plan);
        for (const std::int64_t rows : plan.to_host().dropped) dropped += rows;
        expect(plan.to_host().rows_received == 12, "kept rows differ from receive_rows");
      } catch (const Error& error) {
        expect(error.code() == ErrorCode::capacity, error.what());
        expect(plan.to_host() == PlanData{}, "a plan that could not be filled is not empty");
        ++errors;
      }
    });
    EXPECT_EQ(errors, overflow == Overflow::error ? 2 : 0);
    EXPECT_EQ(dropped, overflow == Overflow::error ? 0 : 40 - 24);
  }
}

TEST(Exchange, DuplicateExpertsTravelOnceAndBothWeightsCount) {
  Batch batch = make_batch(3, 2, 4, 4, 8, 14);
  batch.ids = {0, 3, 3, 1, 2, 2, 2, 2, -1, -1, -1, -1};
  run_threads(2, [&](Group& group) {
    for (const LegalPair& pair : kLegalPairs) {
      ExchangeConfig config = config_for(batch);
      config.layout = pair.layout;
      config.reduction = pair.reduction;
      config.sum_at = pair.sum_at;
      Exchange exchange(group, config);
      expect_dense<Bf16>(exchange, batch, run_layer<Bf16>(exchange, batch));
      // Experts 0, 1 live on rank 0 and 2, 3 on rank 1: token 0 has three slots on two ranks, token
      // 1 has one, token 2 none.
      const std::int64_t first = batch.token_begin[static_cast<std::size_t>(group.rank())];
      std::int64_t rows = 0;
      for (std::int64_t t = first; t < first + batch.tokens_of(group.rank()); ++t) {
        rows += t == 2 ? 0 : t == 1 ? 1 : pair.layout == Layout::tokens ? 2 : 3;
      }
      expect(exchange.traffic().dispatch_rows == rows,
             fmt::format("{} rows were sent, expected {}", exchange.traffic().dispatch_rows, rows));
    }
  });
}

TEST(Exchange, RowScalarsTravelOutAndHome) {
  const Batch batch = make_batch(15, 3, 6, 2, 8, 15);
  for (const Layout layout : {Layout::grouped, Layout::slots, Layout::tokens}) {
    ExchangeConfig config = config_for(batch);
    config.layout = layout;
    config.reduction = std::nullopt;
    run_threads(3, [&](Group& group) {
      Exchange exchange(group, config);
      Plan plan = exchange.make_plan();
      const Routing routing = batch.routing_of(group.rank());
      exchange.plan(routing, plan);
      std::vector<Bf16> x = tokens_of<Bf16>(batch, group.rank());
      std::vector<Bf16> out(x.size());
      const Received r = exchange.dispatch(plan, view(x, 8), {.row_scalars = routing.weights});
      expect(r.row_scalars.size() == static_cast<std::size_t>(r.slot_begin.back()),
             "scalars for every row");
      std::vector<float> doubled(r.row_scalars.begin(), r.row_scalars.end());
      for (float& value : doubled) value *= 2;
      std::vector<float> home(static_cast<std::size_t>(routing.tokens * routing.topk), -1.0F);
      const TensorView y = exchange.combine_input(plan);
      apply_experts<Bf16>(exchange, r, y);
      exchange.combine(plan, y, view(out, 8),
                       {.row_scalars = doubled.data(), .scalars_out = home.data()});
      for (std::size_t i = 0; i < home.size(); ++i)
        expect(home[i] == 2 * routing.weights[i], "a scalar went astray");
    });
  }
}

// A rank without tokens has no memory to point at, and still sends home the scalars of its rows.
TEST(Exchange, RowScalarsTravelThroughRanksWithoutTokens) {
  Batch batch = make_batch(15, 3, 6, 2, 8, 15);
  batch.token_begin = {0, 15, 15, 15};
  run_threads(3, [&](Group& group) {
    Exchange exchange(group, config_for(batch));
    Plan plan = exchange.make_plan();
    const Routing routing = batch.routing_of(group.rank());
    const bool empty = routing.tokens == 0;
    exchange.plan(routing, plan);
    std::vector<Bf16> x = tokens_of<Bf16>(batch, group.rank());
    std::vector<Bf16> out(x.size());
    const Received r =
        exchange.dispatch(plan, view(x, 8), {.row_scalars = empty ? nullptr : routing.weights});
    std::vector<float> home(static_cast<std::size_t>(routing.tokens * routing.topk), -1.0F);
    const TensorView y = exchange.combine_input(plan);
    apply_experts<Bf16>(exchange, r, y);
    exchange.combine(plan, y, view(out, 8),
                     {.row_scalars = r.row_scalars.data(), .scalars_out = home.data()});
    for (std::size_t i = 0; i < home.size(); ++i)
      expect(home[i] == routing.weights[i], "a scalar went astray");
  });
}

TEST(Exchange, RowScalarsOfSomeRanksOnlyEndTheStepOnAllOfThem) {
  const Batch batch = make_batch(15, 3, 6, 2, 8, 15);
  for (const bool homewards : {false, true}) {
    std::atomic<int> errors{0};
    run_threads(3, [&](Group& group) {
      Exchange exchange(group, config_for(batch));
      Plan plan = exchange.make_plan();
      const Routing routing = batch.routing_of(group.rank());
      exchange.plan(routing, plan);
      std::vector<Bf16> x = tokens_of<Bf16>(batch, group.rank());
      std::vector<Bf16> out(x.size());
      std::vector<float> home(static_cast<std::size_t>(routing.tokens * routing.topk));
      const bool silent = group.rank() == 1;
      try {
        const Received r = exchange.dispatch(
            plan, view(x, 8), {.row_scalars = silent && !homewards ? nullptr : routing.weights});
        const TensorView y = exchange.combine_input(plan);
        apply_experts<Bf16>(exchange, r, y);
        exchange.combine(
            plan, y, view(out, 8),
            {.row_scalars = silent ? nullptr : r.row_scalars.data(), .scalars_out = home.data()});
        group.barrier();  // the others have found out by then
        exchange.check();
      } catch (const Error& error) {
        expect(error.code() == ErrorCode::misuse && error.peer() == 1, error.what());
        ++errors;
        group.barrier();
      }
    });
    EXPECT_EQ(errors, 3);
  }
}

TEST(Exchange, TheAddendIsTheLastTermBeforeTheOneRounding) {
  const Batch batch = make_batch(7, 2, 4, 2, 8, 16);
  run_threads(2, [&](Group& group) {
    Exchange exchange(group, config_for(batch, DType::f32));
    Plan plan = exchange.make_plan();
    exchange.plan(batch.routing_of(group.rank()), plan);
    std::vector<float> x = tokens_of<float>(batch, group.rank());
    std::vector<float> out(x.size());
    std::vector<float> addend(x.size(), 0.375F);
    const Received r = exchange.dispatch(plan, view(x, 8));
    const TensorView y = exchange.combine_input(plan);
    apply_experts<float>(exchange, r, y);
    exchange.combine(plan, y, view(out, 8), {.addend = view(addend, 8)});
    for (std::int64_t t = 0; t < batch.tokens_of(group.rank()); ++t) {
      for (std::int64_t h = 0; h < 8; ++h) {
        const std::int64_t token = batch.token_begin[static_cast<std::size_t>(group.rank())] + t;
        expect(out[static_cast<std::size_t>(t * 8 + h)] ==
                   dense_by_token<float>(batch, token, h) + 0.375F,
               "the addend was not added last");
      }
    }
  });
}

TEST(Exchange, WindowBytesIsWhatTheLayoutTakes) {
  const Batch batch = make_batch(7, 2, 4, 2, 8, 17);
  run_threads(2, [&](Group& group) {
    const ExchangeConfig config = config_for(batch);
    const Exchange exchange(group, config);
    expect(exchange.window_bytes() == config.window_bytes(2), "window_bytes() differs");
  });
}

TEST(Exchange, AnIllegalConfigurationNamesTheFieldTheValueAndWhatIsAllowed) {
  ExchangeConfig config{.experts = 4, .topk = 2, .hidden = 8, .max_tokens = 4};
  config.topk = 0;
  try {
    static_cast<void>(config.window_bytes(2));
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::bad_argument);
    EXPECT_THAT(error.what(), HasSubstr("topk is 0; it must lie in 1..64"));
  }
}

}  // namespace
}  // namespace wherry::test
