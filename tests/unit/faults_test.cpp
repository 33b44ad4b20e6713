// How a fault reaches every rank (docs/protocol.md), on windows without an exchange.
#include <gtest/gtest.h>

#include "exchange/window.hpp"
#include "fabric/addressable.hpp"
#include "group/state.hpp"
#include "support/layer.hpp"

namespace wherry::test {
namespace {

constexpr layout::WindowParams kSmall{
    .ranks = 4, .num_slots = 4, .topk = 1, .depth = 1, .row_bytes = 16, .row_capacity = 1};

Window make_window(const Group& group, Seconds deadline) {
  const layout::WindowLayout layout = layout::make_window_layout(kSmall);
  auto mapped = std::make_shared<MappedWindow>();
  mapped->fabric = group.state().connect(group, {layout.bytes, false, deadline});
  return {group, mapped, 0, layout, deadline};
}

// Rank 1 has failed. Rank 0 found out and has told only rank 2 so far; rank 3 knows nothing.
void tell_rank_2_alone(const Window& window) {
  window_word(window.base(2), offsetof(layout::WindowHeader, fault))
      .store(layout::pack_fault({static_cast<std::uint32_t>(ErrorCode::peer_failed) + 1,
                                 static_cast<std::uint32_t>(Stage::plan), 1, 0, 1}),
             std::memory_order_release);
}

void expect_rank_1_blamed(const Window& window, int rank) {
  const auto fault = window.fault();
  const int blamed = fault.has_value() ? fault->peer() : -1;
  expect(blamed == 1, fmt::format("rank {} blames rank {}", rank, blamed));
}

TEST(Faults, WhoIsToldInAWaitTellsAllBeforeItThrows) {
  run_threads(4, [](Group& group) {
    Window window = make_window(group, Seconds(30));
    group.barrier();
    if (group.rank() == 0) tell_rank_2_alone(window);
    group.barrier();
    if (group.rank() == 2) {
      std::vector<std::uint32_t> counts(4);
      try {
        window.wait_all({layout::Channel::counts, 0, 1}, {Stage::plan, 1}, counts);
        expect(false, "the wait did not end in the fault");
      } catch (const Error& error) {
        expect(error.code() == ErrorCode::peer_failed && error.peer() == 1, error.what());
      }
    }
    group.barrier();
    expect_rank_1_blamed(window, group.rank());
    group.barrier();
  });
}

TEST(Faults, WhoIsToldBetweenTwoCallsTellsAllBeforeItThrows) {
  run_threads(4, [](Group& group) {
    const Window window = make_window(group, Seconds(30));
    group.barrier();
    if (group.rank() == 0) tell_rank_2_alone(window);
    group.barrier();
    if (group.rank() == 2) expect_rank_1_blamed(window, 2);
    group.barrier();
    if (group.rank() == 3) expect_rank_1_blamed(window, 3);
    group.barrier();
  });
}

}  // namespace
}  // namespace wherry::test
