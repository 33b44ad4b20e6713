// In which order calls may come, how many may be in flight, and what happens to those that come late,
// in another order, or never.
#include <thread>

#include "conformance/matrix.hpp"
#include "support/delays.hpp"

namespace wherry::test {
namespace {

// A step whose halves are apart.
struct Flight {
  Plan plan;
  std::vector<Bf16> x, out;
  Exchange::DispatchHandle dispatch;
  Received received;

  void begin(Exchange& exchange, const Batch& batch) {
    x = tokens_of<Bf16>(batch, exchange.rank());
    out.assign(x.size(), Bf16{});
    dispatch = exchange.dispatch_begin(plan, view(x, batch.hidden));
  }
  void arrive() { received = dispatch.finish(); }
  void combine(Exchange& exchange, const Batch& batch) {
    const TensorView y = exchange.combine_input(plan);
    apply_experts<Bf16>(exchange, received, y);
    exchange.combine(plan, y, view(out, batch.hidden));
    expect_dense<Bf16>(exchange, batch, out);
  }
};

Flight planned(Exchange& exchange, const Batch& batch) {
  Flight f;
  f.plan = exchange.make_plan();
  exchange.plan(batch.routing_of(exchange.rank()), f.plan);
  return f;
}

TEST(WrongHandle, AnotherStepsPlanOrTheWrongShapeIsAnError) {
  in_every_setting(settings(), [](const Setting& s) {
    const Batch batch = make_batch(17, s.ranks, 9, 3, 24, 141);
    s.run([&](Group& group) {
      Exchange exchange(group, s.config(batch));
      Exchange other(group, s.config(batch));
      Flight f = planned(exchange, batch);
      Flight unused = planned(exchange, batch);
      f.begin(exchange, batch);
      f.arrive();
      const TensorView y = exchange.combine_input(f.plan);
      const TensorView out = view(f.out, batch.hidden);
      expect_error(ErrorCode::misuse, "no finished dispatch of this plan waits for its combine",
                   [&] { exchange.combine(unused.plan, y, out); });
      expect_error(ErrorCode::misuse, "made by another exchange",
                   [&] { other.combine(f.plan, y, out); });
      Plan empty = exchange.make_plan();
      expect_error(ErrorCode::misuse, "has not been filled",
                   [&] { exchange.combine(empty, y, out); });
      f.combine(exchange, batch);
      expect_error(ErrorCode::misuse, "no finished dispatch of this plan waits for its combine",
                   [&] { exchange.combine(f.plan, y, out); });
      expect_error(ErrorCode::misuse, "finish() was called twice", [&] { f.dispatch.finish(); });
      // All of these were this rank's to see: the exchange goes on. A wrong shape ends it everywhere.
      f.begin(exchange, batch);
      f.arrive();
      TensorView narrow = exchange.combine_input(f.plan);
      narrow.cols -= 1;
      group.barrier();
      expect_error(ErrorCode::bad_argument, "", [&] { exchange.combine(f.plan, narrow, out); });
      expect_error(ErrorCode::bad_argument, "", [&] { exchange.check(); });
    });
  });
}

TEST(ReuseAndOrder, OnePlanServesSeveralDispatches) {
  in_every_setting(settings(), [](const Setting& s) {
    const Batch batch = make_batch(17, s.ranks, 9, 3, 24, 142);
    s.run([&](Group& group) {
      Exchange exchange(group, s.config(batch));
      Flight f = planned(exchange, batch);
      for (int i = 0; i < 4; ++i) {
        f.begin(exchange, batch);
        f.arrive();
        f.combine(exchange, batch);
      }
    });
  });
}

TEST(ReuseAndOrder, TwoAndThreeStepsAreInFlightUpToTheDepthAndNotBeyond) {
  in_every_setting(settings(), [](const Setting& s) {
    const Batch batch = make_batch(17, s.ranks, 9, 3, 24, 143);
    for (const int depth : {2, 3}) {
      ExchangeConfig config = s.config(batch);
      config.depth = depth;
      s.run([&](Group& group) {
        Exchange exchange(group, config);
        std::vector<Batch> batches;
        std::vector<Flight> flights;
        for (int i = 0; i < depth; ++i) {
          batches.push_back(shifted(batch, i));
          flights.push_back(planned(exchange, batches.back()));
        }
        for (int round = 0; round < 3; ++round) {
          for (std::size_t i = 0; i < flights.size(); ++i) flights[i].begin(exchange, batches[i]);
          expect_error(ErrorCode::misuse, fmt::format("depth is {}", depth), [&] {
            static_cast<void>(
                exchange.dispatch_begin(flights[0].plan, view(flights[0].x, batch.hidden)));
          });
          // Finished in another order than begun; the first is combined after the last has come.
          for (std::size_t i = flights.size(); i-- > 0;) flights[i].arrive();
          for (std::size_t i = 0; i < flights.size(); ++i) flights[i].combine(exchange, batches[i]);
        }
      });
    }
  });
}

TEST(BufferReuseRace, NoBarrierAndRandomDelaysLeaveEveryBitAsItWas) {
  in_every_setting(settings({2, 3}), [](const Setting& s) {
    const Batch batch = make_batch(10, s.ranks, 6, 2, 8, 144);
    ExchangeConfig config = s.config(batch);
    for (const int depth : {1, 2}) {
      config.depth = depth;
      s.run([&](Group& group) { run_delayed_steps(group, batch, config, 200); });
    }
  });
}

// Signals to one peer overtake each other and those to another, as on a network without order.
TEST(UnorderedNetwork, SignalsThatOvertakeEachOtherChangeNothing) {
  in_every_setting(settings({2, 3}), [](const Setting& s) {
    const Batch batch = make_batch(10, s.ranks, 6, 2, 8, 145);
    ExchangeConfig config = s.config(batch);
    config.depth = 2;
    s.run([&](Group& group) {
      reorder_signals(group, config);
      Exchange exchange(group, config);
      for (int step = 0; step < 60; ++step) {
        const Batch now = shifted(batch, step);
        Flight a = planned(exchange, now);
        Flight b = planned(exchange, batch);
        a.begin(exchange, now);
        b.begin(exchange, batch);
        b.arrive();
        a.arrive();
        a.combine(exchange, now);
        b.combine(exchange, batch);
      }
    });
  });
}

enum class Phase { plan, dispatch, combine };
constexpr Phase kPhases[] = {Phase::plan, Phase::dispatch, Phase::combine};

// A step in which `rank` does `late` before that phase.
template <typename Late>
void step_with(Exchange& exchange, const Batch& batch, Phase phase, int rank, Late late) {
  const bool mine = exchange.rank() == rank;
  if (mine && phase == Phase::plan) late();
  Flight f = planned(exchange, batch);
  if (mine && phase == Phase::dispatch) late();
  f.begin(exchange, batch);
  f.arrive();
  if (mine && phase == Phase::combine) late();
  f.combine(exchange, batch);
}

TEST(DelayedPeer, OthersWaitForARankThatSleepsInAnyPhase) {
  in_every_setting(settings({2, 3}), [](const Setting& s) {
    const Batch batch = make_batch(10, s.ranks, 6, 2, 8, 146);
    s.run([&](Group& group) {
      Exchange exchange(group, s.config(batch));
      for (const Phase phase : kPhases) {
        step_with(exchange, batch, phase, s.ranks - 1,
                  [] { std::this_thread::sleep_for(std::chrono::milliseconds(60)); });
      }
    });
  });
}

TEST(SkippedCall, ARankThatNeverCallsIsNamedWithThePhaseWhenTimeIsUp) {
  in_every_setting(settings({2, 3}), [](const Setting& s) {
    const Batch batch = make_batch(10, s.ranks, 6, 2, 8, 147);
    ExchangeConfig config = s.config(batch);
    config.deadline = Seconds(0.3);
    for (const Phase phase : kPhases) {
      s.run([&](Group& group) {
        Exchange exchange(group, config);
        const int silent = s.ranks - 1;
        const Stage stage = phase == Phase::plan       ? Stage::plan
                            : phase == Phase::dispatch ? Stage::dispatch_recv
                                                       : Stage::combine_recv;
        struct Silent {};
        try {
          step_with(exchange, batch, phase, silent, [] { throw Silent{}; });
          expect(false, "nobody missed it");
        } catch (const Error& error) {
          expect(error.code() == ErrorCode::timeout && error.peer() == silent &&
                     error.stage() == stage,
                 error.what());
        } catch (const Silent&) {
          // It stays until the others have given up, then is told.
          const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(10);
          bool told = false;
          while (!told && std::chrono::steady_clock::now() < until) {
            std::this_thread::sleep_for(std::chrono::milliseconds(5));
            try {
              exchange.check();
            } catch (const Error& error) {
              told = error.code() == ErrorCode::timeout && error.peer() == silent;
            }
          }
          expect(told, "the silent rank was not told");
        }
        group.barrier();  // nobody leaves while others look
      });
    }
  });
}

}  // namespace
}  // namespace wherry::test
