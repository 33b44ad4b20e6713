// The meeting place of ranks that one launcher started: an allgather in shared memory, who has
// left, and the first error. Lives in private memory for threads and in an anonymous shared
// mapping for forked processes; never in the file system.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "support/doorbell.hpp"
#include "wherry/error.hpp"
#include "wherry/group.hpp"

namespace wherry {

class Board {
 public:
  // Maps a zeroed board for `ranks` ranks, visible to forked children. Throws out_of_memory.
  explicit Board(int ranks);
  ~Board();
  Board(const Board&) = delete;
  Board& operator=(const Board&) = delete;

  [[nodiscard]] int ranks() const noexcept { return ranks_; }

  // Collective. Longer messages go in rounds of kChunk bytes; two buffers a rank suffice, because
  // a rank that sees every peer in round r knows that all have read round r-1.
  [[nodiscard]] std::vector<Group::Bytes> allgather(int rank, std::span<const std::byte> mine,
                                                    Seconds deadline);

  // The rank will not enter another collective; waits for it end at once.
  void leave(int rank);

  // Records an error of a rank; the first one wins and is what the launcher rethrows.
  void report(int rank, const Error& error);
  [[nodiscard]] std::optional<Error> first_error() const;

 private:
  static constexpr std::size_t kChunk = 16384;
  static constexpr std::size_t kMessage = 1024;

  struct Seat;
  struct Head;
  [[nodiscard]] Head& head() const noexcept;
  [[nodiscard]] Seat& seat(int rank) const noexcept;
  [[nodiscard]] Doorbell doorbell() const noexcept;
  void wait_for_round(int rank, int peer, std::uint64_t round, Clock::time_point deadline,
                      Seconds allowed);

  int ranks_;
  std::size_t bytes_;
  std::byte* memory_;
};

}  // namespace wherry
