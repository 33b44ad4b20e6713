// The first half of a stage waits for nobody's first half: ranks begin in turn, each when all that the rank
// ahead of it was asked to do is done.
#include <gtest/gtest.h>

#include <tuple>

#include "gpu/on_gpu.hpp"
#include "gpu/twin.hpp"

namespace wherry::test {
namespace {

void begin_in_turn(Group& group, int gpu, cudaStream_t stream, ExchangeConfig config) {
  constexpr std::int64_t kTokens = 12;
  config.deadline = Seconds(2.0);  // of a wait that should not be there
  OnGpu mine(group, gpu, stream, config);
  std::vector<std::int32_t> ids(static_cast<std::size_t>(kTokens * config.topk));
  for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int32_t>(i % 6);
  mine.make_plan(ids, kTokens);
  const auto in_turn = [&](auto begin) {
    for (int rank = 0; rank < group.size(); ++rank) {
      if (rank == group.rank()) begin();
      GPU_OK(cudaStreamSynchronize(stream));
      mine.exchange.check();
      group.barrier();
    }
  };
  in_turn([] {});
  for (int step = 0; step < 4; ++step) {
    Exchange::DispatchHandle rows;
    in_turn([&] { rows = mine.exchange.dispatch_begin(mine.plan, mine.rows(kTokens)); });
    rows.finish();
    Exchange::CombineHandle sums;
    in_turn([&] {
      sums = mine.exchange.combine_begin(mine.plan, mine.exchange.combine_input(mine.plan),
                                         mine.sums(kTokens));
    });
    sums.finish();
  }
  GPU_OK(cudaStreamSynchronize(stream));
  mine.exchange.check();
  group.barrier();
}

TEST(Halves, BeginWithoutThePeers) {
  for (const auto& [layout, reduction, sum_at] :
       {std::tuple{Layout::grouped, Reduction::by_rank, SumAt::expert},
        std::tuple{Layout::tokens, Reduction::by_rank, SumAt::home},
        std::tuple{Layout::slots, Reduction::by_token, SumAt::home}}) {
    EXPECT_NO_THROW(on_processes(3, [&](Group& group, int gpu, cudaStream_t stream) {
      ExchangeConfig config = config_of(make_batch(36, 3, 6, 2, 64, 67), layout, reduction);
      if (layout == Layout::grouped) config.sum_at = sum_at;
      begin_in_turn(group, gpu, stream, config);
    }));
  }
}

}  // namespace
}  // namespace wherry::test
