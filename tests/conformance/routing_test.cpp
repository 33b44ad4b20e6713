// What may stand in a routing: ranks without tokens, experts that nobody or everybody chose, no
// expert, one expert twice, and ids that do not exist.
#include "conformance/matrix.hpp"

namespace wherry::test {
namespace {

Batch batch_of(const Setting& s, std::vector<std::int64_t> tokens, int experts = 9, int topk = 3) {
  tokens.resize(static_cast<std::size_t>(s.ranks), tokens.empty() ? 5 : tokens.back());
  Batch batch = make_batch(std::accumulate(tokens.begin(), tokens.end(), std::int64_t{0}), s.ranks,
                           experts, topk, 24, 101);
  for (std::size_t r = 0; r < tokens.size(); ++r) {
    batch.token_begin[r + 1] = batch.token_begin[r] + tokens[r];
  }
  return batch;
}

// Forward, then the backward pass on the same plan: gradients go out by the same way and their sums
// come home, and so do the scalars.
void run_both_ways(const Setting& s, const Batch& batch) {
  s.run([&](Group& group) {
    Exchange exchange(group, s.config(batch));
    const Routing routing = batch.routing_of(group.rank());
    Plan plan = exchange.make_plan();
    exchange.plan(routing, plan);
    std::vector<Bf16> x = tokens_of<Bf16>(batch, group.rank());
    std::vector<float> home(static_cast<std::size_t>(routing.tokens * routing.topk), -1.0F);
    for (int pass = 0; pass < 2; ++pass) {
      std::vector<Bf16> out(x.size());
      const Received r =
          exchange.dispatch(plan, view(x, batch.hidden), {.row_scalars = routing.weights});
      const TensorView y = exchange.combine_input(plan);
      apply_experts<Bf16>(exchange, r, y);
      exchange.combine(plan, y, view(out, batch.hidden),
                       {.row_scalars = r.row_scalars.data(), .scalars_out = home.data()});
      expect_dense<Bf16>(exchange, batch, out);
    }
    for (std::size_t i = 0; i < home.size(); ++i) {
      const bool sent = static_cast<const std::int32_t*>(routing.ids)[i] >= 0;
      expect(home[i] == (sent ? routing.weights[i] : 0.0F), "a scalar went astray");
    }
  });
}

TEST(EmptyRank, SomeRanksOrAllHaveNoTokens) {
  in_every_setting(settings(), [](const Setting& s) {
    run_both_ways(s, batch_of(s, {0, 6, 0, 3}));
    run_both_ways(s, batch_of(s, {4, 0}));
    run_both_ways(s, batch_of(s, {0}));
  });
}

TEST(NobodyChoseMe, AllTokensGoToTheExpertsOfOneRank) {
  in_every_setting(settings(), [](const Setting& s) {
    Batch batch = batch_of(s, {8}, 9, 1);
    const Placement placement = Placement::contiguous(batch.experts, s.ranks);
    for (std::int32_t& id : batch.ids) id %= placement.num_local_slots(0);
    run_both_ways(s, batch);
    s.run([&](Group& group) {
      Exchange exchange(group, s.config(batch));
      Plan plan = exchange.make_plan();
      exchange.plan(batch.routing_of(group.rank()), plan);
      expect((plan.to_host().rows_received == 0) == (group.rank() != 0), "rows went elsewhere");
    });
  });
}

TEST(UnevenRanks, TokensDifferFromRankToRank) {
  in_every_setting(settings({4, 7}), [](const Setting& s) {
    run_both_ways(s, batch_of(s, {1, 7, 64, 128}));
    run_both_ways(s, batch_of(s, {13, 127, 128, 1, 0, 97}));
  });
}

TEST(NoExpert, EntriesRowsAndLastSlotsAreMinusOne) {
  in_every_setting(settings(), [](const Setting& s) {
    for (const double share : {0.25, 0.5, 1.0}) {
      run_both_ways(s, make_batch(31, s.ranks, 9, 3, 24, 102, share));
    }
    Batch batch = batch_of(s, {9});
    for (std::size_t i = 0; i < batch.ids.size(); ++i) {
      const std::size_t token = i / 3;
      if (token % 3 == 0 || (token % 3 == 1 && i % 3 == 2)) batch.ids[i] = -1;
    }
    run_both_ways(s, batch);
    // A token without expert combines to exactly +0, whatever was in the memory.
    s.run([&](Group& group) {
      Exchange exchange(group, s.config(batch));
      Plan plan = exchange.make_plan();
      exchange.plan(batch.routing_of(group.rank()), plan);
      std::vector<Bf16> x = tokens_of<Bf16>(batch, group.rank());
      std::vector<Bf16> out(x.size(), Bf16{0xFFFF});
      const Received r = exchange.dispatch(plan, view(x, batch.hidden));
      const TensorView y = exchange.combine_input(plan);
      apply_experts<Bf16>(exchange, r, y);
      exchange.combine(plan, y, view(out, batch.hidden));
      const std::int64_t first = batch.token_begin[static_cast<std::size_t>(group.rank())];
      for (std::int64_t t = 0; t < plan.tokens(); ++t) {
        if ((first + t) % 3 != 0) continue;
        for (std::int64_t h = 0; h < batch.hidden; ++h) {
          expect(out[static_cast<std::size_t>(t * batch.hidden + h)].bits == 0, "not exactly zero");
        }
      }
    });
  });
}

TEST(BadExpertId, IsAnErrorOnEveryRankNamingTokenChoiceAndId) {
  in_every_setting(settings(), [](const Setting& s) {
    const Batch batch = batch_of(s, {6});
    for (const std::int32_t id : {9, 1000, -2, INT32_MAX, INT32_MIN}) {
      s.run([&](Group& group) {
        Exchange exchange(group, s.config(batch));
        Batch bad = batch;
        const int culprit = s.ranks - 1;
        bad.ids[static_cast<std::size_t>(bad.token_begin[static_cast<std::size_t>(culprit)] * 3 +
                                         7)] = id;
        Plan plan = exchange.make_plan();
        expect_error(ErrorCode::bad_routing, fmt::format("ids[2, 1] is {}; allowed are 0..8", id),
                     [&] { exchange.plan(bad.routing_of(group.rank()), plan); });
        // The exchange goes on.
        expect_dense<Bf16>(exchange, batch, run_layer<Bf16>(exchange, batch));
      });
    }
  });
}

TEST(Duplicates, BothWeightsOfAnExpertThatIsChosenTwiceCount) {
  in_every_setting(settings(), [](const Setting& s) {
    Batch batch = batch_of(s, {3}, 100, 4);
    for (std::size_t t = 0; t < batch.ids.size() / 4; ++t) {
      const std::int32_t ids[] = {5, 88, 88, 65};
      const float weights[] = {0.1F, 0.3F, 0.2F, 0.4F};
      std::copy(ids, ids + 4, batch.ids.begin() + static_cast<std::ptrdiff_t>(t * 4));
      std::copy(weights, weights + 4, batch.weights.begin() + static_cast<std::ptrdiff_t>(t * 4));
    }
    s.run([&](Group& group) {
      Exchange exchange(group, s.config(batch));
      expect_dense<Bf16>(exchange, batch, run_layer<Bf16>(exchange, batch));
      const std::int64_t rows = batch.tokens_of(group.rank());
      expect(s.form.layout == Layout::tokens || exchange.traffic().dispatch_rows == rows * 3,
             "an expert's row travelled twice");
    });
  });
}

TEST(ExtremeSkew, EveryTokenHasTheSameExpertsOrOneExpertTakesAll) {
  in_every_setting(settings(), [](const Setting& s) {
    Batch same = batch_of(s, {12});
    Batch one = same;
    for (std::size_t i = 0; i < same.ids.size(); ++i) {
      same.ids[i] = static_cast<std::int32_t>(i % 3) * 4;
      one.ids[i] = 7;
    }
    run_both_ways(s, same);
    s.run([&](Group& group) {
      Exchange exchange(group, s.config(one));
      expect_dense<Bf16>(exchange, one, run_layer<Bf16>(exchange, one));
    });
  });
}

// Up to the declared room everything works; beyond, all ranks say so, or rows are dropped and counted.
TEST(ExtremeSkew, BeyondTheDeclaredRoomIsAnErrorOrIsDroppedAndCounted) {
  in_every_setting(settings(), [](const Setting& s) {
    Batch batch = batch_of(s, {10});
    for (std::size_t i = 0; i < batch.ids.size(); ++i) {
      batch.ids[i] = i % 3 == 0 ? 8 : -1;  // all to the last expert
    }
    const std::int64_t rows = batch.tokens();
    const auto with_room = [&](std::int64_t room, Overflow overflow) {
      ExchangeConfig config = s.config(batch);
      (s.form.layout == Layout::slots ? config.rows_per_slot : config.receive_rows) = room;
      config.overflow = overflow;
      return config;
    };
    s.run([&](Group& group) {
      Exchange roomy(group, with_room(rows, Overflow::error));
      expect_dense<Bf16>(roomy, batch, run_layer<Bf16>(roomy, batch));
      Exchange narrow(group, with_room(rows - 1, Overflow::error));
      Plan plan = narrow.make_plan();
      expect_error(ErrorCode::capacity, fmt::format("would receive {} rows", rows),
                   [&] { narrow.plan(batch.routing_of(group.rank()), plan); });
      if (s.form.layout == Layout::tokens) return;  // takes error only

      Exchange dropping(group, with_room(rows - 4, Overflow::drop));
      Plan dropped = dropping.make_plan();
      dropping.plan(batch.routing_of(group.rank()), dropped);
      std::int64_t count = 0;
      for (const std::int64_t n : dropped.to_host().dropped) count += n;
      // Rows are kept in the order of source ranks: the last rank's last tokens have no room.
      expect(count == (group.rank() == s.ranks - 1 ? 4 : 0), fmt::format("{} dropped", count));
      Batch kept = batch;
      for (std::int64_t t = rows - 4; t < rows; ++t) kept.ids[static_cast<std::size_t>(t * 3)] = -1;
      expect_dense<Bf16>(dropping, kept, run_layer<Bf16>(dropping, batch));
    });
  });
}

}  // namespace
}  // namespace wherry::test
