// What all ranks must agree on, and what they are told where they do not.
#include "conformance/matrix.hpp"

namespace wherry::test {
namespace {

TEST(MoreThanAgreed, MoreTokensThanTheMostIsAnErrorOnEveryRankAndTheExchangeGoesOn) {
  in_every_setting(settings(), [](const Setting& s) {
    const Batch batch = make_batch(10 * s.ranks, s.ranks, 9, 3, 24, 131);
    ExchangeConfig config = s.config(batch);
    s.run([&](Group& group) {
      Exchange exchange(group, config);
      const int culprit = s.ranks - 1;
      const std::int64_t most = config.max_tokens;
      std::vector<std::int32_t> ids(static_cast<std::size_t>((most + 1) * 3), 0);
      Plan plan = exchange.make_plan();
      expect_error(ErrorCode::bad_argument,
                   fmt::format("routing has {} tokens; max_tokens is {}", most + 1, most), [&] {
                     const bool mine = group.rank() == culprit;
                     exchange.plan(mine ? Routing(ids.data(), nullptr, most + 1, 3)
                                        : batch.routing_of(group.rank()),
                                   plan);
                   });
      expect_error(ErrorCode::bad_argument, "routing has topk 2; the exchange was made for 3", [&] {
        const bool mine = group.rank() == culprit;
        exchange.plan(mine ? Routing(ids.data(), nullptr, 1, 2) : batch.routing_of(group.rank()),
                      plan);
      });
      expect_dense<Bf16>(exchange, batch, run_layer<Bf16>(exchange, batch));
    });
  });
}

struct Change {
  const char* field;
  void (*apply)(ExchangeConfig&);
};

TEST(MoreThanAgreed, RanksWithDifferentConfigurationsAreToldTheFieldAndBothValues) {
  static constexpr Change kChanges[] = {
      {"max_tokens", [](ExchangeConfig& c) { c.max_tokens += 1; }},
      {"hidden", [](ExchangeConfig& c) { c.hidden += 8; }},
      {"experts", [](ExchangeConfig& c) { c.experts += 1; }},
      {"topk", [](ExchangeConfig& c) { c.topk += 1; }},
      {"dtype", [](ExchangeConfig& c) { c.dtype = DType::f32; }},
      {"depth", [](ExchangeConfig& c) { c.depth = 3; }},
      {"weights", [](ExchangeConfig& c) { c.weights = Weights::caller; }},
      {"deadline", [](ExchangeConfig& c) { c.deadline = Seconds(31); }},
      {"expert_ids", [](ExchangeConfig& c) { c.expert_ids = ExpertIds::physical; }},
      {"placement.slot_to_expert",
       [](ExchangeConfig& c) {
         std::vector<int> slots{8, 7, 6, 5, 4, 3, 2, 1, 0};
         const Placement now = Placement::contiguous(9, c.placement->num_ranks());
         c.placement =
             Placement::from_slots(9, slots, {now.slot_begin().begin(), now.slot_begin().end()});
       }},
  };
  in_every_setting(settings({2, 3, 7}), [](const Setting& s) {
    const Batch batch = make_batch(10, s.ranks, 9, 3, 24, 132);
    s.run([&](Group& group) {
      for (const Change& change : kChanges) {
        ExchangeConfig config = s.config(batch);
        config.placement = Placement::contiguous(9, s.ranks);
        if (change.field == std::string_view("experts")) config.placement = std::nullopt;
        if (group.rank() == s.ranks - 1) change.apply(config);
        expect_error(ErrorCode::config_mismatch, fmt::format("{} is ", change.field),
                     [&] { const Exchange exchange(group, config); });
        expect_error(ErrorCode::config_mismatch, fmt::format("on rank {}", s.ranks - 1),
                     [&] { const Exchange exchange(group, config); });
      }
    });
  });
}

TEST(MoreThanAgreed, AnIllegalConfigurationOfOneRankIsAnErrorOnAll) {
  in_every_setting(settings({2, 3, 7}), [](const Setting& s) {
    const Batch batch = make_batch(10, s.ranks, 9, 3, 24, 133);
    s.run([&](Group& group) {
      ExchangeConfig config = s.config(batch);
      const bool mine = group.rank() == s.ranks - 1;
      if (mine) config.topk = 0;
      expect_error(ErrorCode::bad_argument,
                   mine ? std::string("topk is 0; it must lie in 1..64")
                        : fmt::format("rank {} has an illegal configuration", s.ranks - 1),
                   [&] { const Exchange exchange(group, config); });
      run_and_verify<Bf16>(group, batch, s.config(batch));
    });
  });
}

}  // namespace
}  // namespace wherry::test
