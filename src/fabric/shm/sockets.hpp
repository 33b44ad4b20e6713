// Unix sockets between the ranks of one host: they carry the window's file descriptor once and stay
// open as the sign of life. Abstract names: nothing in the file system, nothing left after a crash.
#pragma once

#include <string>
#include <vector>

#include "support/fd.hpp"
#include "wherry/group.hpp"

namespace wherry::shm {

// A connected socket to every peer (invalid for the rank itself). Collective, bounded by
// `deadline`. Throws timeout or peer_failed naming the peer that is missing, or system.
[[nodiscard]] std::vector<Fd> connect_all(const Group& group, Seconds deadline);

// Sends `fd` to a peer / receives the peer's. Each throws system, timeout or peer_failed.
void send_fd(const Fd& socket, int fd, int rank, int peer);
[[nodiscard]] Fd receive_fd(const Fd& socket, int rank, int peer, Clock::time_point deadline);

// True once the other end is closed, as it is when its process has died.
[[nodiscard]] bool hung_up(const Fd& socket) noexcept;

}  // namespace wherry::shm
