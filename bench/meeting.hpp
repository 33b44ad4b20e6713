// Where all ranks meet between the parts of a timed step: one counter in memory they share. Cheaper
// than Group::barrier(), and nobody sleeps on a futex, so ranks leave within microseconds of each
// other even where they outnumber the cores.
#pragma once

#include <cstdint>
#include <memory>

#include "fabric/fabric.hpp"
#include "wherry/group.hpp"

namespace wherry::bench {

class Meeting {
 public:
  // Collective.
  Meeting(const Group& group, Seconds deadline);

  // Collective: returns when every rank has come. Throws timeout, or peer_failed naming the peer.
  void meet();

 private:
  void give_up_if_hopeless(std::int64_t since_ns);

  int rank_;
  int size_;
  Seconds deadline_;
  std::unique_ptr<Fabric> fabric_;
  std::uint64_t* arrivals_;  // in rank 0's window; only grows
  std::uint64_t expected_ = 0;
};

// Nanoseconds of the monotonic clock, which all processes of a host share.
[[nodiscard]] std::int64_t now_ns() noexcept;

}  // namespace wherry::bench
