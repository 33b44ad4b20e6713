#include "fabric/shm/sockets.hpp"

#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>

#include "support/check.hpp"

namespace wherry::shm {

namespace {

[[noreturn]] void fail_system(int rank, int peer, const char* what) {
  const int error = errno;
  throw Error(ErrorCode::system, {Stage::startup, rank, peer},
              fmt::format("{}: {}", what, std::strerror(error)));
}

std::string random_name() {
  std::array<unsigned char, 16> random{};
  if (getrandom(random.data(), random.size(), 0) != static_cast<ssize_t>(random.size()))
    fail_system(-1, -1, "getrandom");
  std::string text = "wherry-";
  for (const unsigned char byte : random) text += fmt::format("{:02x}", byte);
  return text;
}

socklen_t abstract_address(const std::string& name, sockaddr_un& address) {
  address = {};
  address.sun_family = AF_UNIX;  // sun_path[0] stays 0: an abstract name
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

// Only ranks of the same user may join: anybody on the host can see an abstract name.
void check_same_user(const Fd& socket, int rank) {
  ucred peer{};
  socklen_t length = sizeof(peer);
  if (getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0)
    fail_system(rank, -1, "SO_PEERCRED");
  WHERRY_CHECK(peer.uid == geteuid(), ErrorCode::system, (Error::Where{Stage::startup, rank, -1}),
               "a process of user {} tried to join the group of user {}", peer.uid, geteuid());
}

Fd listen_on(const std::string& name, int backlog, int rank) {
  Fd listener(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!listener.valid()) fail_system(rank, -1, "socket");
  sockaddr_un address{};
  const socklen_t length = abstract_address(name, address);
  if (bind(listener.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0)
    fail_system(rank, -1, "bind");
  if (listen(listener.get(), backlog) != 0) fail_system(rank, -1, "listen");
  return listener;
}

Fd connect_to(const std::string& name, int rank, int peer) {
  Fd connection(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!connection.valid()) fail_system(rank, peer, "socket");
  sockaddr_un address{};
  const socklen_t length = abstract_address(name, address);
  if (connect(connection.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0) {
    throw Error(ErrorCode::peer_failed, {Stage::startup, rank, peer},
                fmt::format("rank {} cannot be reached: {}", peer, std::strerror(errno)));
  }
  check_same_user(connection, rank);
  const std::int32_t me = rank;
  if (send(connection.get(), &me, sizeof(me), MSG_NOSIGNAL) != static_cast<ssize_t>(sizeof(me))) {
    fail_system(rank, peer, "send");
  }
  return connection;
}

}  // namespace

std::vector<Fd> connect_all(const Group& group, Seconds deadline) {
  const int rank = group.rank();
  const int size = group.size();
  const std::string name = random_name();
  const Fd listener = listen_on(name, size, rank);
  const auto names = group.allgather(std::as_bytes(std::span(name)));
  const auto until = Clock::now() + std::chrono::duration_cast<Clock::duration>(deadline);

  // Connects to lower ranks wait in their backlog, so nobody waits for anybody here.
  std::vector<Fd> sockets(static_cast<std::size_t>(size));
  for (int peer = 0; peer < rank; ++peer) {
    const Group::Bytes& bytes = names[static_cast<std::size_t>(peer)];
    const std::string theirs(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    sockets[static_cast<std::size_t>(peer)] = connect_to(theirs, rank, peer);
  }
  for (int waiting = size - 1 - rank; waiting > 0;) {
    if (!wait_for(listener, POLLIN, until)) {
      int missing = rank + 1;
      while (sockets[static_cast<std::size_t>(missing)].valid()) ++missing;
      throw Error(ErrorCode::timeout, {Stage::startup, rank, missing},
                  fmt::format("rank {} did not connect within {:g} s", missing, deadline.count()));
    }
    Fd connection(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!connection.valid()) fail_system(rank, -1, "accept");
    check_same_user(connection, rank);
    std::int32_t peer = -1;
    if (!wait_for(connection, POLLIN, until)) continue;  // named by the time-out above
    if (recv(connection.get(), &peer, sizeof(peer), MSG_WAITALL) !=
        static_cast<ssize_t>(sizeof(peer)))
      continue;
    WHERRY_CHECK(peer > rank && peer < size && !sockets[static_cast<std::size_t>(peer)].valid(),
                 ErrorCode::internal, (Error::Where{Stage::startup, rank, peer}),
                 "unexpected connection from rank {}", peer);
    sockets[static_cast<std::size_t>(peer)] = std::move(connection);
    --waiting;
  }
  return sockets;
}

void send_fd(const Fd& socket, int fd, int rank, int peer) {
  char byte = 'w';
  iovec data{&byte, 1};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(header), &fd, sizeof(int));
  if (sendmsg(socket.get(), &message, MSG_NOSIGNAL) != 1) fail_system(rank, peer, "sendmsg");
}

Fd receive_fd(const Fd& socket, int rank, int peer, Clock::time_point deadline) {
  if (!wait_for(socket, POLLIN, deadline)) {
    throw Error(ErrorCode::timeout, {Stage::startup, rank, peer},
                fmt::format("rank {} did not send its window in time", peer));
  }
  char byte = 0;
  iovec data{&byte, 1};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  const ssize_t got = recvmsg(socket.get(), &message, MSG_CMSG_CLOEXEC);
  cmsghdr* header = got == 1 ? CMSG_FIRSTHDR(&message) : nullptr;
  if (header == nullptr || header->cmsg_type != SCM_RIGHTS) {
    throw Error(ErrorCode::peer_failed, {Stage::startup, rank, peer},
                fmt::format("rank {} ended before it sent its window", peer));
  }
  int fd = -1;
  std::memcpy(&fd, CMSG_DATA(header), sizeof(int));
  return Fd(fd);
}

bool hung_up(const Fd& socket) noexcept {
  pollfd p{socket.get(), POLLRDHUP, 0};
  return poll(&p, 1, 0) > 0 && (p.revents & (POLLHUP | POLLRDHUP | POLLERR)) != 0;
}

}  // namespace wherry::shm
