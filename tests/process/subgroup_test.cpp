// Groups within groups: several at once in one process, expert groups inside a larger world, and
// survivors who go on without the dead.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>

#include "support/layer.hpp"
#include "support/shared.hpp"

namespace wherry::test {
namespace {

using ::testing::HasSubstr;

void run_a_layer(Group& group, unsigned seed) {
  const Batch batch = make_batch(20, group.size(), 6, 2, 16, seed);
  run_and_verify<Bf16>(group, batch, config_for(batch));
}

using Launch = void (*)(int, const std::function<void(Group&)>&, const RunOptions&);
constexpr Launch kBoth[] = {run_threads, run_processes};

TEST(Subgroup, ExpertGroupsInsideALargerWorld) {
  for (const Launch run : kBoth) {
    EXPECT_NO_THROW(run(
        6,
        [](Group& world) {
          // Two expert groups of three, interleaved; the second counts backwards.
          const std::vector<int> even{0, 2, 4};
          const std::vector<int> odd{5, 3, 1};
          const bool is_even = world.rank() % 2 == 0;
          Group experts = world.subgroup(is_even ? even : odd);
          expect(experts.size() == 3, "size");
          expect(experts.rank() == (is_even ? world.rank() / 2 : (5 - world.rank()) / 2), "rank");
          run_a_layer(experts, is_even ? 81 : 82);
          run_a_layer(world, 83);
        },
        {}));
  }
}

TEST(Subgroup, ExchangesOfTwoGroupsAreInFlightAtOnceInOneProcess) {
  for (const Launch run : kBoth) {
    EXPECT_NO_THROW(
        run(4,
            [](Group& world) {
              const std::vector<int> neighbours =
                  world.rank() < 2 ? std::vector{0, 1} : std::vector{2, 3};
              Group pair = world.subgroup(neighbours);
              const Batch wide = make_batch(21, 4, 6, 2, 16, 84);
              const Batch narrow = make_batch(9, 2, 4, 2, 16, 85);
              Exchange of_world(world, config_for(wide));
              Exchange of_pair(pair, config_for(narrow));
              Plan wide_plan = of_world.make_plan();
              Plan narrow_plan = of_pair.make_plan();
              for (int round = 0; round < 20; ++round) {
                of_world.plan(wide.routing_of(world.rank()), wide_plan);
                of_pair.plan(narrow.routing_of(pair.rank()), narrow_plan);
                std::vector<Bf16> xw = tokens_of<Bf16>(wide, world.rank());
                std::vector<Bf16> xn = tokens_of<Bf16>(narrow, pair.rank());
                std::vector<Bf16> out_w(xw.size());
                std::vector<Bf16> out_n(xn.size());
                auto dispatch_w = of_world.dispatch_begin(wide_plan, view(xw, 16));
                auto dispatch_n = of_pair.dispatch_begin(narrow_plan, view(xn, 16));
                const Received received_n = dispatch_n.finish();
                const Received received_w = dispatch_w.finish();
                apply_experts<Bf16>(of_world, received_w, of_world.combine_input(wide_plan));
                apply_experts<Bf16>(of_pair, received_n, of_pair.combine_input(narrow_plan));
                auto combine_w = of_world.combine_begin(
                    wide_plan, of_world.combine_input(wide_plan), view(out_w, 16));
                auto combine_n = of_pair.combine_begin(
                    narrow_plan, of_pair.combine_input(narrow_plan), view(out_n, 16));
                combine_w.finish();
                combine_n.finish();
                expect_dense<Bf16>(of_world, wide, out_w);
                expect_dense<Bf16>(of_pair, narrow, out_n);
              }
            },
            {}));
  }
}

TEST(Subgroup, OfASubgroupAndOfOneRank) {
  for (const Launch run : kBoth) {
    EXPECT_NO_THROW(run(5,
                        [](Group& world) {
                          for (int again = 0; again < 3; ++again) {
                            if (world.rank() == 4) continue;
                            const std::vector<int> four{3, 2, 1, 0};
                            Group most = world.subgroup(four);
                            run_a_layer(most, 86);
                            if (most.rank() > 1) continue;
                            const std::vector<int> two{0, 1};
                            Group few = most.subgroup(two);
                            run_a_layer(few, 87);
                            const std::vector<int> self{few.rank()};
                            Group one = few.subgroup(self);
                            run_a_layer(one, 88);
                          }
                        },
                        {}));
  }
}

TEST(Subgroup, BadListsAreNamed) {
  run_threads(3, [](Group& group) {
    const auto refused = [&](std::vector<int> ranks, const std::string& part) {
      try {
        static_cast<void>(group.subgroup(ranks));
        expect(false, "was accepted");
      } catch (const Error& error) {
        expect(error.code() == ErrorCode::bad_argument, error.what());
        expect(error.message().find(part) != std::string::npos, error.what());
      }
    };
    const int other = (group.rank() + 1) % 3;
    refused({}, "ranks is empty");
    refused({0, 1, 3}, "ranks is [0 1 3]; allowed are different ranks from 0 to 2");
    refused({-1, 0}, "allowed are different ranks");
    refused({0, 1, 1}, "allowed are different ranks");
    refused({other}, fmt::format("ranks is [{}], but this is rank {}", other, group.rank()));
  });
  const Group own = Group::from_allgather(
      0, 1, [](auto mine) { return std::vector<Group::Bytes>{{mine.begin(), mine.end()}}; });
  try {
    const std::vector<int> ranks{0};
    static_cast<void>(own.subgroup(ranks));
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::unsupported);
    EXPECT_THAT(error.what(), HasSubstr("make the subgroup as the group was made"));
  }
}

TEST(Subgroup, WhoDoesNotComeIsNamedByAllThatDid) {
  std::atomic<int> errors{0};
  run_threads(4, [&](Group& group) {
    if (group.rank() == 2) return;
    const std::vector<int> all{0, 1, 2, 3};
    try {
      static_cast<void>(group.subgroup(all, Seconds(0.4)));
    } catch (const Error& error) {
      expect(error.code() == ErrorCode::timeout && error.peer() == 2, error.what());
      ++errors;
    }
  });
  EXPECT_EQ(errors, 3);
}

TEST(Subgroup, SurvivorsGoOnWithoutARankThatDied) {
  const Shared<std::atomic<int>> went_on;
  EXPECT_THROW(run_processes(4,
                             [&](Group& group) {
                               const Batch batch = make_batch(24, 4, 8, 2, 16, 89);
                               Exchange exchange(group, config_for(batch));
                               expect_dense<Bf16>(exchange, batch,
                                                  run_layer<Bf16>(exchange, batch));
                               if (group.rank() == 1) raise(SIGKILL);
                               std::vector<int> survivors;
                               try {
                                 static_cast<void>(run_layer<Bf16>(exchange, batch));
                               } catch (const Error& error) {
                                 expect(error.code() == ErrorCode::peer_failed, error.what());
                                 for (int rank = 0; rank < 4; ++rank) {
                                   if (rank != error.peer()) survivors.push_back(rank);
                                 }
                               }
                               Group rest = group.subgroup(survivors);
                               run_a_layer(rest, 90);
                               ++*went_on;
                             }),
               Error);  // of the launcher: a rank was killed
  EXPECT_EQ(*went_on, 3);
}

}  // namespace
}  // namespace wherry::test
