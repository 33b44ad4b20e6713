#include "group/board.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "support/check.hpp"

namespace wherry {

struct Board::Seat {
  alignas(64) std::uint64_t round;  // rounds this rank has written
  std::uint32_t left;
  std::uint64_t length[2];  // bytes of the whole message, per buffer
  std::byte chunk[2][kChunk];
};

struct Board::Head {
  alignas(64) std::uint32_t bell;
  std::uint32_t sleepers;
  // First error: claimed by a compare-exchange, then filled, then published.
  std::uint32_t error_claimed;
  std::uint32_t error_published;
  std::int32_t error_code, error_stage, error_rank, error_peer;
  char error_message[kMessage];
};

Board::Board(int ranks)
    : ranks_(ranks),
      bytes_(sizeof(Head) + sizeof(Seat) * static_cast<std::size_t>(ranks)) {
  void* memory = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  WHERRY_CHECK(memory != MAP_FAILED, ErrorCode::out_of_memory,
               (Error::Where{Stage::startup, -1, -1}),
               "no memory for the start-up board of {} ranks ({} bytes)", ranks, bytes_);
  memory_ = static_cast<std::byte*>(memory);
}

Board::~Board() { munmap(memory_, bytes_); }

Board::Head& Board::head() const noexcept { return *reinterpret_cast<Head*>(memory_); }
Board::Seat& Board::seat(int rank) const noexcept {
  return *(reinterpret_cast<Seat*>(memory_ + sizeof(Head)) + rank);
}
Doorbell Board::doorbell() const noexcept { return {head().bell, head().sleepers}; }

void Board::wait_for_round(int rank, int peer, std::uint64_t round, Clock::time_point deadline,
                           Seconds allowed) {
  Seat& theirs = seat(peer);
  const auto ready = [&] {
    return std::atomic_ref(theirs.round).load(std::memory_order_acquire) >= round;
  };
  bool left = false;
  const bool came = doorbell().wait(deadline, ready, [&] {
    left = std::atomic_ref(theirs.left).load(std::memory_order_acquire) != 0;
    return left || Clock::now() >= deadline;
  });
  if (came) return;
  const Error::Where where{Stage::group, rank, peer};
  if (left) {
    throw Error(ErrorCode::peer_failed, where,
                fmt::format("rank {} ended before it entered the collective that rank {} waits in",
                            peer, rank));
  }
  throw Error(
      ErrorCode::timeout, where,
      fmt::format("rank {} did not enter the collective within {:g} s", peer, allowed.count()));
}

std::vector<Group::Bytes> Board::allgather(int rank, std::span<const std::byte> mine,
                                           Seconds deadline) {
  const auto until = Clock::now() + std::chrono::duration_cast<Clock::duration>(deadline);
  std::vector<Group::Bytes> all(static_cast<std::size_t>(ranks_));
  Seat& own = seat(rank);
  std::size_t rounds = 1;  // at least one, so that lengths are known
  for (std::size_t i = 0; i < rounds; ++i) {
    const std::uint64_t round = std::atomic_ref(own.round).load(std::memory_order_relaxed) + 1;
    const std::size_t buffer = round % 2;
    const std::size_t begin = std::min(i * kChunk, mine.size());
    const std::size_t count = std::min(kChunk, mine.size() - begin);
    own.length[buffer] = mine.size();
    if (count > 0) std::memcpy(own.chunk[buffer], mine.data() + begin, count);
    std::atomic_ref(own.round).store(round, std::memory_order_release);
    doorbell().ring();
    for (int peer = 0; peer < ranks_; ++peer) {
      wait_for_round(rank, peer, round, until, deadline);
      const Seat& theirs = seat(peer);
      Group::Bytes& into = all[static_cast<std::size_t>(peer)];
      into.resize(theirs.length[buffer]);
      const std::size_t from = std::min(i * kChunk, into.size());
      const std::size_t bytes = std::min(kChunk, into.size() - from);
      if (bytes > 0) std::memcpy(into.data() + from, theirs.chunk[buffer], bytes);
      rounds = std::max(rounds, (into.size() + kChunk - 1) / kChunk);
    }
  }
  return all;
}

void Board::leave(int rank) {
  std::atomic_ref(seat(rank).left).store(1, std::memory_order_release);
  doorbell().ring();
}

void Board::report(int rank, const Error& error) {
  Head& h = head();
  std::uint32_t expected = 0;
  if (!std::atomic_ref(h.error_claimed).compare_exchange_strong(expected, 1)) return;
  h.error_code = static_cast<std::int32_t>(error.code());
  h.error_stage = static_cast<std::int32_t>(error.stage());
  h.error_rank = error.rank() >= 0 ? error.rank() : rank;
  h.error_peer = error.peer();
  const std::size_t length = std::min(error.message().size(), kMessage - 1);
  std::memcpy(h.error_message, error.message().data(), length);
  h.error_message[length] = '\0';
  std::atomic_ref(h.error_published).store(1, std::memory_order_release);
}

std::optional<Error> Board::first_error() const {
  Head& h = head();
  if (std::atomic_ref(h.error_published).load(std::memory_order_acquire) == 0) return std::nullopt;
  return Error(static_cast<ErrorCode>(h.error_code),
               {static_cast<Stage>(h.error_stage), h.error_rank, h.error_peer},
               std::string(h.error_message));
}

}  // namespace wherry
