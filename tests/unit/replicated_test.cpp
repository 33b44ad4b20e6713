// Token-replicated groups: several ranks hold the same tokens and share the work of sending them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <numeric>

#include "support/layer.hpp"

namespace wherry::test {
namespace {

using ::testing::HasSubstr;

ExchangeConfig config_of(const Batch& batch, int replicated, CombineTo combine_to,
                         const LegalPair& pair = {Layout::grouped, Reduction::by_token}) {
  ExchangeConfig config = config_for(batch);
  config.replicated = replicated;
  config.combine_to = combine_to;
  config.layout = pair.layout;
  config.reduction = pair.reduction;
  config.sum_at = pair.sum_at;
  return config;
}

TEST(Replicated, EveryLegalPairEqualsItsDenseRuleForAllAndForShares) {
  for (const LegalPair& pair : kLegalPairs) {
    for (const auto& [ranks, replicated] : {std::pair{2, 2}, {4, 2}, {4, 4}, {6, 3}}) {
      // 23 tokens: shares differ, and with one set of four some rows meet at their sender.
      const Batch batch = make_batch(23, ranks / replicated, 9, 3, 24, 61, 0.2);
      for (const CombineTo to : {CombineTo::all, CombineTo::share}) {
        SCOPED_TRACE(fmt::format("{} {} to {} on {} ranks, {} alike", name(pair.layout),
                                 name(pair.reduction), name(to), ranks, replicated));
        const ExchangeConfig config = config_of(batch, replicated, to, pair);
        EXPECT_NO_THROW(run_threads(ranks, [&](Group& group) {
          run_and_verify<Bf16>(group, batch, config);
          run_and_verify<float>(group, batch, config);
        }));
      }
    }
  }
}

TEST(Replicated, WorksWithFewerTokensThanRanks) {
  for (const std::int64_t tokens : {0, 1, 3, 40}) {
    const Batch batch = make_batch(tokens, 2, 5, 2, 16, 62);
    run_threads(6, [&](Group& group) {
      run_and_verify<Bf16>(group, batch, config_of(batch, 3, CombineTo::share));
      run_and_verify<Bf16>(group, batch, config_of(batch, 3, CombineTo::all));
    });
  }
}

TEST(Replicated, ReplicasOfAnExpertDoNotShowInTheResult) {
  const Batch batch = make_batch(31, 2, 4, 2, 16, 63, 0.1);
  ExchangeConfig config = config_of(batch, 2, CombineTo::all);
  config.placement = Placement::from_slots(4, {0, 1, 2, 0, 3, 0, 1}, {0, 2, 4, 6, 7});
  run_threads(4, [&](Group& group) { run_and_verify<float>(group, batch, config); });
}

TEST(Replicated, EachRowIsSentOnceAndLoadsCountEachTokenOnce) {
  const Batch batch = make_batch(29, 2, 6, 3, 16, 64);
  std::atomic<std::int64_t> sent{0};
  run_threads(4, [&](Group& group) {
    Exchange exchange(group, config_of(batch, 2, CombineTo::share));
    expect_dense<Bf16>(exchange, batch, run_layer<Bf16>(exchange, batch));
    sent += exchange.traffic().dispatch_rows;
    const auto loads = exchange.loads();
    expect(std::accumulate(loads.begin(), loads.end(), std::int64_t{0}) == 29 * 3, "loads");
  });
  EXPECT_EQ(sent, 29 * 3);
}

TEST(Replicated, ScalarsAndAddendsAreThoseOfTheTokensThatComeHome) {
  const Batch batch = make_batch(22, 2, 6, 2, 8, 65);
  for (const CombineTo to : {CombineTo::all, CombineTo::share}) {
    run_threads(4, [&](Group& group) {
      ExchangeConfig config = config_of(batch, 2, to);
      config.dtype = DType::f32;
      Exchange exchange(group, config);
      Plan plan = exchange.make_plan();
      const Routing routing = batch.routing_of(home_of(exchange));
      exchange.plan(routing, plan);
      const auto [begin, end] = home_range(exchange, batch);
      expect(plan.home_tokens() == end - begin, "home_tokens()");
      std::vector<float> x = tokens_of<float>(batch, home_of(exchange));
      std::vector<float> out(static_cast<std::size_t>((end - begin) * 8));
      std::vector<float> addend(out.size(), 0.375F);
      std::vector<float> home(static_cast<std::size_t>((end - begin) * 2), -1.0F);
      const Received r = exchange.dispatch(plan, view(x, 8), {.row_scalars = routing.weights});
      const TensorView y = exchange.combine_input(plan);
      apply_experts<float>(exchange, r, y);
      exchange.combine(plan, y, view(out, 8),
                       {.row_scalars = r.row_scalars.data(),
                        .scalars_out = home.data(),
                        .addend = view(addend, 8)});
      const std::int64_t first =
          batch.token_begin[static_cast<std::size_t>(home_of(exchange))] + begin;
      for (std::int64_t t = 0; t < end - begin; ++t) {
        for (std::int64_t k = 0; k < 2; ++k) {
          expect(home[static_cast<std::size_t>(t * 2 + k)] ==
                     batch.weights[static_cast<std::size_t>((first + t) * 2 + k)],
                 "a scalar went astray");
        }
        for (std::int64_t h = 0; h < 8; ++h) {
          expect(out[static_cast<std::size_t>(t * 8 + h)] ==
                     dense_by_token<float>(batch, first + t, h) + 0.375F,
                 "a sum went astray");
        }
      }
    });
  }
}

TEST(Replicated, WhatIsDroppedIsDroppedForAllThatHoldTheToken) {
  const Batch batch = make_batch(40, 1, 4, 2, 8, 66);
  ExchangeConfig config = config_of(batch, 2, CombineTo::all);
  config.receive_rows = 30;
  config.overflow = Overflow::drop;
  std::atomic<std::int64_t> dropped{0};
  std::vector<std::vector<Bf16>> outs(2);
  run_threads(2, [&](Group& group) {
    Exchange exchange(group, config);
    outs[static_cast<std::size_t>(group.rank())] = run_layer<Bf16>(exchange, batch);
    Plan plan = exchange.make_plan();
    exchange.plan(batch.routing_of(0), plan);
    for (const std::int64_t rows : plan.to_host().dropped) dropped += rows;
  });
  EXPECT_EQ(dropped, 80 - 60);
  EXPECT_TRUE(
      std::ranges::equal(std::as_bytes(std::span(outs[0])), std::as_bytes(std::span(outs[1]))));
}

TEST(Replicated, DifferentRoutingsOfTheSameTokensAreAnErrorOnEveryRankAndTheExchangeGoesOn) {
  const Batch batch = make_batch(12, 2, 5, 2, 8, 67);
  for (const bool weight : {false, true}) {
    std::atomic<int> errors{0};
    run_threads(4, [&](Group& group) {
      Exchange exchange(group, config_of(batch, 2, CombineTo::all));
      Batch other = batch;
      const auto last = other.ids.size() - 1;
      if (group.rank() == 3 && weight) other.weights[last] += 0.5F;
      if (group.rank() == 3 && !weight) other.ids[last] = (other.ids[last] + 1) % 5;
      Plan plan = exchange.make_plan();
      try {
        exchange.plan(other.routing_of(home_of(exchange)), plan);
      } catch (const Error& error) {
        expect(error.code() == ErrorCode::bad_routing && error.peer() == 3, error.what());
        expect(error.message().starts_with("ranks 2 and 3 hold the same tokens (replicated is 2)"),
               error.what());
        ++errors;
      }
      expect_dense<Bf16>(exchange, batch, run_layer<Bf16>(exchange, batch));
    });
    EXPECT_EQ(errors, 4);
  }
}

TEST(Replicated, MustDivideTheRanks) {
  ExchangeConfig config{.experts = 4, .topk = 2, .hidden = 8, .max_tokens = 4};
  for (const int replicated : {0, 3, 8}) {
    config.replicated = replicated;
    try {
      static_cast<void>(config.window_bytes(4));
      FAIL() << replicated;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::bad_argument);
      EXPECT_THAT(error.what(), HasSubstr(fmt::format("replicated is {}; it must be at least 1 and "
                                                      "divide the 4 ranks",
                                                      replicated)));
    }
  }
}

// The caller chooses among the replicas.
TEST(PhysicalIds, NameSlotsAndGiveTheSameBitsWhicheverReplicaIsChosen) {
  const Batch batch = make_batch(30, 3, 4, 2, 16, 68, 0.1);
  ExchangeConfig config = config_for(batch, DType::f32);
  config.placement = Placement::from_slots(4, {0, 1, -1, 2, 0, 3, 0, 1}, {0, 3, 6, 8});
  config.expert_ids = ExpertIds::physical;
  for (const bool last : {false, true}) {
    Batch slots = batch;
    std::vector<std::int64_t> wide;
    for (std::int32_t& id : slots.ids) {
      if (id >= 0)
        id = last ? config.placement->slots_of(id).back() : config.placement->slots_of(id)[0];
      wide.push_back(id);
    }
    run_threads(3, [&](Group& group) {
      Exchange exchange(group, config);
      expect_dense<float>(exchange, batch, run_layer<float>(exchange, slots));
      // The plan does what the ids say, whatever their width.
      const Routing narrow = slots.routing_of(group.rank());
      const auto first = static_cast<std::size_t>(
          slots.token_begin[static_cast<std::size_t>(group.rank())] * slots.topk);
      Plan a = exchange.make_plan();
      Plan b = exchange.make_plan();
      exchange.plan(narrow, a);
      exchange.plan(Routing(wide.data() + first, narrow.weights, narrow.tokens, narrow.topk), b);
      expect(a.to_host() == b.to_host(), "int64 ids differ");
      expect(std::ranges::equal(a.to_host().slot,
                                std::span(slots.ids).subspan(first, a.to_host().slot.size())),
             "another slot was taken");
    });
  }
}

TEST(PhysicalIds, OfSlotsThatDoNotExistOrHoldNothingAreErrorsOnEveryRank) {
  const Batch batch = make_batch(6, 2, 3, 1, 8, 69);
  ExchangeConfig config = config_for(batch);
  config.placement = Placement::from_slots(3, {0, 1, -1, 2}, {0, 2, 4});
  config.expert_ids = ExpertIds::physical;
  struct Bad {
    std::int32_t id;
    const char* message;
  };
  for (const Bad& bad_id : {Bad{4, "ids[0, 0] is 4; allowed are the slots 0..3 and -1 for none"},
                            {2, "ids[0, 0] is slot 2, which holds no expert"},
                            {-2, "ids[0, 0] is -2; allowed are the slots 0..3 and -1 for none"}}) {
    std::atomic<int> errors{0};
    run_threads(2, [&](Group& group) {
      Exchange exchange(group, config);
      Batch bad = batch;
      for (std::int32_t& slot : bad.ids) slot = 3;
      bad.ids[static_cast<std::size_t>(bad.token_begin[1])] = bad_id.id;
      Plan plan = exchange.make_plan();
      try {
        exchange.plan(bad.routing_of(group.rank()), plan);
      } catch (const Error& error) {
        expect(error.code() == ErrorCode::bad_routing && error.peer() == 1, error.what());
        expect(error.message() == bad_id.message, error.what());
        ++errors;
      }
    });
    EXPECT_EQ(errors, 2);
  }
}

}  // namespace
}  // namespace wherry::test
