#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "group/bind.hpp"
#include "group/board.hpp"
#include "group/state.hpp"
#include "support/check.hpp"
#include "wherry/group.hpp"

namespace wherry {

void run_threads(int ranks, const std::function<void(Group&)>& fn, const RunOptions& options) {
  WHERRY_CHECK_ARGUMENT(ranks >= 1, Stage::startup, "ranks is {}; it must be at least 1", ranks);
  const auto board = std::make_shared<Board>(ranks);
  const std::string meeting = detail::new_meeting();
  std::mutex mutex;
  std::exception_ptr first;
  const auto run = [&](int rank) {
    Group group =
        Group::from_allgather(rank, ranks, [board, rank, deadline = options.deadline](auto mine) {
          return board->allgather(rank, mine, deadline);
        });
    group.state().meeting = meeting;
    try {
      group.state().beside = bind_rank(rank, ranks);
      fn(group);
    } catch (...) {
      const std::scoped_lock lock(mutex);
      if (first == nullptr) first = std::current_exception();
    }
    board->leave(rank);
  };
  std::vector<std::jthread> threads;
  threads.reserve(static_cast<std::size_t>(ranks));
  for (int rank = 0; rank < ranks; ++rank) threads.emplace_back(run, rank);
  threads.clear();  // joins
  if (first != nullptr) std::rethrow_exception(first);
}

}  // namespace wherry
