// Any shape works: there is no list of allowed sizes.
#include "conformance/matrix.hpp"

namespace wherry::test {
namespace {

// Few enough tokens that wide rows stay quick.
Batch batch_of(int ranks, int experts, int topk, std::int64_t hidden) {
  const std::int64_t tokens = std::clamp<std::int64_t>(400'000 / (hidden * topk), 3, 23);
  return make_batch(tokens, ranks, experts, topk, hidden, 111, 0.1);
}

void run(const Setting& s, const Batch& batch) {
  s.run([&](Group& group) { run_and_verify<Bf16>(group, batch, s.config(batch)); });
}

TEST(OddShapes, Hidden) {
  const std::vector<Setting> all = settings({3});
  in_every_setting(all, [](const Setting& s) {
    for (const std::int64_t hidden : {1, 2, 3, 7, 8, 9, 63, 2050, 2056, 2880, 3584, 7168, 16384}) {
      SCOPED_TRACE(hidden);
      run(s, batch_of(s.ranks, 6, 2, hidden));
    }
  });
}

TEST(OddShapes, Topk) {
  in_every_setting(settings({4}), [](const Setting& s) {
    for (const int topk : {1, 5, 6, 7, 8, 9, 12, 16, 22, 32, 64}) {
      SCOPED_TRACE(topk);
      run(s, batch_of(s.ranks, 70, topk, 40));
    }
  });
}

TEST(OddShapes, ExpertsThatTheRanksDoNotDivide) {
  in_every_setting(settings(), [](const Setting& s) {
    for (const int experts : {1, 2, 7, 129, 1025}) {
      SCOPED_TRACE(experts);
      run(s, batch_of(s.ranks, experts, std::min(experts, 3), 16));
    }
  });
}

TEST(OddShapes, RanksOfEveryNumber) {
  in_every_setting(settings({1, 2, 3, 5, 6, 7, 8, 13, 16}),
                   [](const Setting& s) { run(s, batch_of(s.ranks, 9, 3, 24)); });
}

// Uneven and explicit placement, some ranks without experts.
TEST(OddShapes, ExplicitPlacementWithRanksThatHoldNothing) {
  in_every_setting(settings({3, 4, 7}), [](const Setting& s) {
    const Batch batch = batch_of(s.ranks, 5, 2, 24);
    ExchangeConfig config = s.config(batch);
    std::vector<int> begin(static_cast<std::size_t>(s.ranks) + 1, 1);
    begin.front() = 0;
    begin.back() = 5;  // rank 0 holds one, the last the others, those between none
    config.placement = Placement::from_slots(5, {3, 0, 4, 1, 2}, begin);
    s.run([&](Group& group) { run_and_verify<Bf16>(group, batch, config); });
  });
}

TEST(OddShapes, Int64IdsMeanTheSameAsInt32) {
  in_every_setting(settings({3}), [](const Setting& s) {
    const Batch batch = batch_of(s.ranks, 9, 3, 24);
    s.run([&](Group& group) {
      Exchange exchange(group, s.config(batch));
      const Routing narrow = batch.routing_of(group.rank());
      const auto* const ids = static_cast<const std::int32_t*>(narrow.ids);
      const std::vector<std::int64_t> wide(ids, ids + narrow.tokens * narrow.topk);
      Plan a = exchange.make_plan();
      Plan b = exchange.make_plan();
      exchange.plan(narrow, a);
      exchange.plan(Routing(wide.data(), narrow.weights, narrow.tokens, narrow.topk), b);
      expect(a.to_host() == b.to_host(), "other plans");
    });
  });
}

// Redundant experts, 128 logical and 2 more: the same bits as without (by_token), and by_rank equals
// its rule for the ranks that serve.
TEST(Replicas, GiveTheSameResultAsWithoutThem) {
  in_every_setting(settings({2, 4}), [](const Setting& s) {
    if (s.form.reduction == Reduction::by_rank) return;
    const Batch batch = batch_of(s.ranks, 128, 8, 24);
    ExchangeConfig config = s.config(batch);
    std::vector<int> slots(128);
    std::iota(slots.begin(), slots.end(), 0);
    slots.push_back(5);
    slots.push_back(77);
    std::vector<int> begin;
    for (int r = 0; r <= s.ranks; ++r) begin.push_back(130 * r / s.ranks);
    config.placement = Placement::from_slots(128, slots, begin);
    s.run([&](Group& group) { run_and_verify<Bf16>(group, batch, config); });
  });
}

}  // namespace
}  // namespace wherry::test
