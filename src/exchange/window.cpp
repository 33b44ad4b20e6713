#include "exchange/window.hpp"

#include <algorithm>
#include <utility>

#include "fabric/addressable.hpp"
#include "group/state.hpp"
#include "support/check.hpp"

namespace wherry {

using layout::Channel;

Window::Window(const Group& group, std::shared_ptr<MappedWindow> mapped, std::uint64_t begin,
               const layout::WindowLayout& layout, Seconds deadline)
    : rank_(group.rank()),
      size_(group.size()),
      allowed_(deadline),
      begin_(begin),
      layout_(layout),
      mapped_(std::move(mapped)),
      beside_(group.state().beside) {
  beside_.resize(static_cast<std::size_t>(size_), false);
  for (int peer = 0; peer < size_; ++peer) {
    bases_.push_back(mapped_->fabric->window(peer) + begin_);
  }
}

void Window::signal_all(const Signal& signal, const std::vector<std::uint32_t>& counts) {
  const std::uint64_t offset =
      layout_.signal(signal.channel, signal.generation, static_cast<std::uint64_t>(rank_));
  // Start with the next rank: not everybody rings at rank 0 first.
  for (int i = 1; i <= size_; ++i) {
    const int peer = (rank_ + i) % size_;
    mapped_->fabric->signal(
        peer, begin_ + offset,
        layout::pack_signal(signal.epoch, counts[static_cast<std::size_t>(peer)]));
  }
}

void Window::wait_all(const Signal& signal, const Place& place,
                      std::vector<std::uint32_t>& counts) {
  const auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(allowed_);
  for (int i = 0; i < size_; ++i) {
    const int peer = (rank_ + i) % size_;
    counts[static_cast<std::size_t>(peer)] = wait_one(peer, signal, place, deadline);
  }
}

std::uint32_t Window::wait_one(int peer, const Signal& signal, const Place& place,
                               Clock::time_point deadline) {
  const std::uint64_t offset =
      layout_.signal(signal.channel, signal.generation, static_cast<std::uint64_t>(peer));
  const auto word = window_word(own(), offset);
  const auto fault = window_word(own(), offsetof(layout::WindowHeader, fault));
  const auto waiting = window_word(own(), offsetof(layout::WindowHeader, waiting));
  std::uint64_t seen = 0;
  const auto come = [&] {
    seen = word.load(std::memory_order_acquire);
    return layout::signal_epoch(seen) >= signal.epoch;
  };
  bool announced = false;
  bool died = false;
  const bool woken =
      window_doorbell(own(), offset)
          .wait(
              deadline, [&] { return come() || fault.load(std::memory_order_acquire) != 0; },
              [&] {
                if (!announced) {  // asleep for the first time: others may want to know for what
                  announced = true;
                  waiting.store(layout::pack_waiting({static_cast<std::uint32_t>(peer),
                                                      static_cast<std::uint32_t>(signal.channel),
                                                      static_cast<std::uint32_t>(signal.generation),
                                                      signal.epoch}),
                                std::memory_order_release);
                  return false;
                }
                // Whoever ends after a fault has told everybody first: `woken` goes before `died` below.
                died = !mapped_->fabric->alive(peer);
                return died || Clock::now() >= deadline;
              },
              beside_[static_cast<std::size_t>(peer)]);
  if (!woken) give_up(peer, signal, place, died);
  if (announced) waiting.store(0, std::memory_order_release);
  if (!come()) fail_with(fault.load(std::memory_order_acquire));
  WHERRY_CHECK(layout::signal_epoch(seen) == signal.epoch, ErrorCode::internal,
               (Error::Where{place.stage, rank_, peer}),
               "step {}: peer {} is at epoch {}, {} was expected", place.step, peer,
               layout::signal_epoch(seen), signal.epoch);
  return layout::signal_count(seen);
}

// Follows who waits for whom to the rank that holds everybody up: one that does not wait, or whose
// wait has been over for a while (it is stopped and cannot notice). Without this a rank would blame
// the survivor that it happens to wait for.
int Window::root_of(int peer) const {
  std::vector<bool> visited(static_cast<std::size_t>(size_), false);
  int current = peer;
  while (current != rank_ && !visited[static_cast<std::size_t>(current)]) {
    visited[static_cast<std::size_t>(current)] = true;
    std::byte* const window = base(current);
    const std::uint64_t record = window_word(window, offsetof(layout::WindowHeader, waiting))
                                     .load(std::memory_order_acquire);
    if (record == 0) return current;
    const layout::Waiting wait = layout::unpack_waiting(record);
    const std::uint64_t offset =
        layout_.signal(static_cast<Channel>(wait.channel), wait.generation, wait.peer);
    const std::uint64_t word = window_word(window, offset).load(std::memory_order_acquire);
    if (layout::signal_epoch(word) >= wait.epoch) return current;
    current = static_cast<int>(wait.peer);
  }
  return current == rank_ ? peer : current;
}

void Window::give_up(int peer, const Signal& signal, const Place& place, bool peer_died) {
  const int blamed = peer_died ? peer : root_of(peer);
  const ErrorCode cause = peer_died ? ErrorCode::peer_failed : ErrorCode::timeout;
  raise(cause, place.stage, blamed, place.step);
  const std::uint64_t word =
      window_word(own(), offsetof(layout::WindowHeader, fault)).load(std::memory_order_acquire);
  const layout::Fault fault = layout::unpack_fault(word);
  // Somebody else may have been first; its cause is the one to report.
  if (static_cast<int>(fault.reporter) != rank_) throw error_of_fault(word, rank_);
  const std::uint64_t offset =
      layout_.signal(signal.channel, signal.generation, static_cast<std::uint64_t>(peer));
  const std::uint32_t seen =
      layout::signal_epoch(window_word(own(), offset).load(std::memory_order_acquire));
  const std::string what =
      peer_died ? fmt::format("rank {} has ended", blamed)
                : fmt::format("rank {} did not come within {:g} s{}", blamed, allowed_.count(),
                              blamed == peer ? "" : fmt::format(" (rank {} waits for it)", peer));
  throw Error(cause, {place.stage, rank_, blamed},
              fmt::format("step {}: {}; expected epoch {} of rank {}, seen {}", place.step, what,
                          signal.epoch, peer, seen));
}

void Window::raise(ErrorCode cause, Stage stage, int blamed, std::uint64_t step) {
  const std::uint64_t word =
      layout::pack_fault({static_cast<std::uint32_t>(cause) + 1, static_cast<std::uint32_t>(stage),
                          static_cast<std::uint32_t>(blamed), static_cast<std::uint32_t>(rank_),
                          static_cast<std::uint32_t>(step)});
  // Own window first: only the first cause of all is kept and passed on.
  std::uint64_t first = 0;
  const std::uint64_t mine =
      window_word(own(), offsetof(layout::WindowHeader, fault))
              .compare_exchange_strong(first, word, std::memory_order_acq_rel)
          ? word
          : first;
  tell_all(mine);
}

// Whoever learns of a fault tells all before it throws. A rank that was told and ended, while others
// were not told yet, would be blamed by those that wait for it.
void Window::tell_all(std::uint64_t word) const {
  for (int peer = 0; peer < size_; ++peer) {
    std::uint64_t none = 0;
    window_word(base(peer), offsetof(layout::WindowHeader, fault))
        .compare_exchange_strong(none, word, std::memory_order_acq_rel);
    // Whoever falls asleep just now and is missed here looks again after a tick.
    const std::uint64_t record = window_word(base(peer), offsetof(layout::WindowHeader, waiting))
                                     .load(std::memory_order_acquire);
    if (record == 0) continue;
    const layout::Waiting wait = layout::unpack_waiting(record);
    window_doorbell(base(peer),
                    layout_.signal(static_cast<Channel>(wait.channel), wait.generation, wait.peer))
        .ring();
  }
}

std::optional<Error> Window::fault() const {
  const std::uint64_t word =
      window_word(own(), offsetof(layout::WindowHeader, fault)).load(std::memory_order_acquire);
  if (word == 0) return std::nullopt;
  tell_all(word);
  return error_of_fault(word, rank_);
}

void Window::fail_with(std::uint64_t word) const {
  tell_all(word);
  throw error_of_fault(word, rank_);
}

Error error_of_fault(std::uint64_t word, int rank) {
  const layout::Fault fault = layout::unpack_fault(word);
  const auto cause = static_cast<ErrorCode>(fault.cause - 1);
  const auto stage = static_cast<Stage>(fault.stage);
  const std::string what = cause == ErrorCode::peer_failed ? "has ended"
                           : cause == ErrorCode::timeout
                               ? "did not come in time"
                               : "made a bad call; its own error says which";
  return Error(cause, {stage, rank, static_cast<int>(fault.blamed)},
               fmt::format("step {} (low 16 bits): rank {} {}; reported by rank {}", fault.step,
                           fault.blamed, what, fault.reporter));
}

}  // namespace wherry
