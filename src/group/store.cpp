#include "group/store.hpp"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>

#include "support/check.hpp"

namespace wherry {

namespace {

constexpr std::uint64_t kMagic = 0x31797272'65687721ULL;  // also tells other byte orders apart
constexpr Seconds kHello{5.0};  // who connects and then says nothing is not one of us
constexpr Seconds kGrace{1.0};  // peers give the hub this much longer to say what is wrong
constexpr std::uint64_t kMostBytes = std::uint64_t{1} << 32;

struct Hello {
  std::uint64_t magic;
  std::int32_t rank;
  std::int32_t size;
};
// What the hub sends before the bytes: 0, or an error of `blamed` with its sentence.
struct Head {
  std::uint64_t bytes;
  std::uint32_t code;  // ErrorCode + 1
  std::int32_t blamed;
};

Clock::time_point after(Seconds seconds) {
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(seconds);
}

enum class Outcome : std::uint8_t { done, closed, late };

Outcome send_all(const Fd& socket, const void* data, std::size_t bytes, Clock::time_point until) {
  const auto* at = static_cast<const std::byte*>(data);
  while (bytes > 0) {
    const ssize_t sent = send(socket.get(), at, bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent > 0) {
      at += sent;
      bytes -= static_cast<std::size_t>(sent);
    } else if (errno == EAGAIN || errno == EINTR) {
      if (!wait_for(socket, POLLOUT, until)) return Outcome::late;
    } else {
      return Outcome::closed;
    }
  }
  return Outcome::done;
}

Outcome receive_all(const Fd& socket, void* data, std::size_t bytes, Clock::time_point until) {
  auto* at = static_cast<std::byte*>(data);
  while (bytes > 0) {
    if (!wait_for(socket, POLLIN, until)) return Outcome::late;
    const ssize_t got = recv(socket.get(), at, bytes, MSG_DONTWAIT);
    if (got > 0) {
      at += got;
      bytes -= static_cast<std::size_t>(got);
    } else if (got == 0 || (errno != EAGAIN && errno != EINTR)) {
      return Outcome::closed;
    }
  }
  return Outcome::done;
}

// One candidate of an address, ready for bind() or connect().
struct Endpoint {
  int family = AF_UNIX;
  sockaddr_storage address{};
  socklen_t length = 0;
};

// `anywhere`: all interfaces of this host instead of the one that is named.
std::vector<Endpoint> endpoints(const StoreAddress& address, bool anywhere, int rank) {
  std::vector<Endpoint> result;
  if (address.host.empty()) {
    Endpoint& e = result.emplace_back();
    auto& unix_address = reinterpret_cast<sockaddr_un&>(e.address);
    unix_address.sun_family = AF_UNIX;
    const std::size_t most = sizeof(unix_address.sun_path) - 1;
    const std::size_t size = std::min(address.name.size(), most);
    std::memcpy(unix_address.sun_path + 1, address.name.data(), size);
    e.length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + size);
    return result;
  }
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = anywhere ? AI_PASSIVE : 0;
  addrinfo* found = nullptr;
  const std::string port = std::to_string(address.port);
  const int error =
      getaddrinfo(anywhere ? nullptr : address.host.c_str(), port.c_str(), &hints, &found);
  WHERRY_CHECK(error == 0, ErrorCode::bad_argument, (Error::Where{Stage::startup, rank, -1}),
               "MASTER_ADDR is '{}', which has no address: {}", address.host, gai_strerror(error));
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(found, &freeaddrinfo);
  for (const addrinfo* a = found; a != nullptr; a = a->ai_next) {
    Endpoint& e = result.emplace_back();
    e.family = a->ai_family;
    std::memcpy(&e.address, a->ai_addr, a->ai_addrlen);
    e.length = a->ai_addrlen;
  }
  return result;
}

Fd socket_for(const Endpoint& e) {
  Fd fd(socket(e.family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int on = 1;
  if (fd.valid() && e.family != AF_UNIX) {
    setsockopt(fd.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  }
  return fd;
}

// At the address that the peers use; on all interfaces if that is another's, as behind a translation
// of addresses.
Fd listen_at(const StoreAddress& address, int backlog, Clock::time_point until) {
  for (;;) {
    int error = 0;
    for (const bool anywhere : {false, true}) {
      for (const Endpoint& e : endpoints(address, anywhere, 0)) {
        Fd fd = socket_for(e);
        const auto* const at = reinterpret_cast<const sockaddr*>(&e.address);
        if (fd.valid() && bind(fd.get(), at, e.length) == 0 && listen(fd.get(), backlog) == 0) {
          return fd;
        }
        error = errno;
      }
      if (error != EADDRNOTAVAIL) break;
    }
    // A store of the same job may be about to close.
    WHERRY_CHECK(
        error == EADDRINUSE && Clock::now() < until, ErrorCode::system,
        (Error::Where{Stage::startup, 0, -1}), "cannot listen at {}: {}{}", address.text(),
        std::strerror(error),
        error == EADDRINUSE && !address.host.empty() ? "; set WHERRY_PORT to a free one" : "");
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

}  // namespace

std::string StoreAddress::text() const {
  return host.empty() ? fmt::format("the socket '{}' of this host", name)
                      : fmt::format("{}:{}", host, port);
}

Store::Store(int rank, int size, const StoreAddress& address, Seconds deadline)
    : rank_(rank),
      size_(size),
      allowed_(deadline) {
  if (size == 1) return;
  rank == 0 ? gather_peers(address) : join_hub(address);
}

void Store::fail(const Error& error) {
  const std::string& text = error.message();
  const Head head{text.size(), static_cast<std::uint32_t>(error.code()) + 1, error.peer()};
  for (const Fd& peer : peers_) {
    if (rank_ != 0 || !peer.valid()) continue;
    if (send_all(peer, &head, sizeof(head), after(kGrace)) != Outcome::done) continue;
    static_cast<void>(send_all(peer, text.data(), text.size(), after(kGrace)));
  }
  failed_ = error;
  throw error;
}

void Store::gather_peers(const StoreAddress& address) {
  const auto until = after(allowed_);
  const Fd listener = listen_at(address, size_, until);
  peers_.resize(static_cast<std::size_t>(size_));
  for (int waiting = size_ - 1; waiting > 0;) {
    if (!wait_for(listener, POLLIN, until)) {
      std::string missing;
      int first = -1;
      for (int peer = 1; peer < size_; ++peer) {
        if (peers_[static_cast<std::size_t>(peer)].valid()) continue;
        if (first < 0) first = peer;
        missing += fmt::format("{}{}", missing.empty() ? "" : ", ", peer);
      }
      fail(Error(
          ErrorCode::timeout, {Stage::startup, 0, first},
          fmt::format(
              "of {} ranks these did not come to {} within {:g} s: {}{}", size_, address.text(),
              allowed_.count(), missing,
              address.host.empty() ? "; without MASTER_ADDR all ranks must share the host" : "")));
    }
    Fd connection(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    Hello hello{};
    if (!connection.valid() || receive_all(connection, &hello, sizeof(hello),
                                           std::min(until, after(kHello))) != Outcome::done) {
      continue;
    }
    if (hello.magic != kMagic) continue;  // not one of us
    const Error::Where where{Stage::startup, 0, hello.rank};
    if (hello.size != size_) {
      peers_.push_back(std::move(connection));  // to be told, too
      fail(Error(ErrorCode::config_mismatch, where,
                 fmt::format("the number of ranks is {} on rank 0 and {} on rank {}", size_,
                             hello.size, hello.rank)));
    }
    const bool known = hello.rank >= 1 && hello.rank < size_;
    if (!known || peers_[static_cast<std::size_t>(hello.rank)].valid()) {
      peers_.push_back(std::move(connection));
      fail(Error(ErrorCode::bad_argument, where,
                 fmt::format("two processes say that they are rank {}", hello.rank)));
    }
    peers_[static_cast<std::size_t>(hello.rank)] = std::move(connection);
    --waiting;
  }
}

void Store::join_hub(const StoreAddress& address) {
  const auto until = after(allowed_);
  const Error::Where where{Stage::startup, rank_, 0};
  peers_.resize(1);
  while (!peers_[0].valid()) {
    for (const Endpoint& e : endpoints(address, false, rank_)) {
      Fd fd = socket_for(e);
      if (fd.valid() &&
          connect(fd.get(), reinterpret_cast<const sockaddr*>(&e.address), e.length) == 0) {
        peers_[0] = std::move(fd);
        break;
      }
    }
    if (peers_[0].valid()) break;
    WHERRY_CHECK(Clock::now() < until, ErrorCode::timeout, where,
                 "rank 0 did not come to {} within {:g} s{}", address.text(), allowed_.count(),
                 address.host.empty() ? "; without MASTER_ADDR all ranks must share the host" : "");
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  const Hello hello{kMagic, rank_, size_};
  if (send_all(peers_[0], &hello, sizeof(hello), until) != Outcome::done) {
    throw Error(ErrorCode::peer_failed, where, "rank 0 has ended during start-up");
  }
}

std::vector<Group::Bytes> Store::allgather(std::span<const std::byte> mine) {
  if (failed_) throw *failed_;
  if (size_ == 1) return {{mine.begin(), mine.end()}};
  return rank_ == 0 ? allgather_at_hub(mine) : allgather_at_peer(mine);
}

std::vector<Group::Bytes> Store::allgather_at_hub(std::span<const std::byte> mine) {
  const auto until = after(allowed_);
  std::vector<Group::Bytes> all(static_cast<std::size_t>(size_));
  all[0].assign(mine.begin(), mine.end());
  const auto check = [&](Outcome outcome, int peer) {
    if (outcome == Outcome::done) return;
    const bool late = outcome == Outcome::late;
    fail(Error(late ? ErrorCode::timeout : ErrorCode::peer_failed, {Stage::group, 0, peer},
               late ? fmt::format("rank {} did not come within {:g} s", peer, allowed_.count())
                    : fmt::format("rank {} has ended", peer)));
  };
  for (int peer = 1; peer < size_; ++peer) {
    const Fd& socket = peers_[static_cast<std::size_t>(peer)];
    std::uint64_t bytes = 0;
    check(receive_all(socket, &bytes, sizeof(bytes), until), peer);
    WHERRY_CHECK(bytes <= kMostBytes, ErrorCode::internal, (Error::Where{Stage::group, 0, peer}),
                 "rank {} announces {} bytes", peer, bytes);
    Group::Bytes& theirs = all[static_cast<std::size_t>(peer)];
    theirs.resize(bytes);
    check(receive_all(socket, theirs.data(), bytes, until), peer);
  }
  Group::Bytes packed;
  for (const Group::Bytes& bytes : all) {
    const std::uint64_t size = bytes.size();
    const auto* const raw = reinterpret_cast<const std::byte*>(&size);
    packed.insert(packed.end(), raw, raw + sizeof(size));
    packed.insert(packed.end(), bytes.begin(), bytes.end());
  }
  const Head head{packed.size(), 0, -1};
  for (int peer = 1; peer < size_; ++peer) {
    const Fd& socket = peers_[static_cast<std::size_t>(peer)];
    check(send_all(socket, &head, sizeof(head), until), peer);
    check(send_all(socket, packed.data(), packed.size(), until), peer);
  }
  return all;
}

std::vector<Group::Bytes> Store::allgather_at_peer(std::span<const std::byte> mine) {
  const auto until = after(allowed_ + kGrace);
  const Error::Where where{Stage::group, rank_, 0};
  const auto check = [&](Outcome outcome) {
    if (outcome == Outcome::done) return;
    const bool late = outcome == Outcome::late;
    fail(Error(late ? ErrorCode::timeout : ErrorCode::peer_failed, where,
               late ? fmt::format("rank 0 did not come within {:g} s", allowed_.count())
                    : "rank 0 has ended"));
  };
  const std::uint64_t bytes = mine.size();
  // A hub that has failed may have closed already: its last words are still to be read.
  static_cast<void>(send_all(peers_[0], &bytes, sizeof(bytes), until));
  static_cast<void>(send_all(peers_[0], mine.data(), mine.size(), until));
  Head head{};
  check(receive_all(peers_[0], &head, sizeof(head), until));
  Group::Bytes packed(head.bytes);
  check(receive_all(peers_[0], packed.data(), packed.size(), until));
  if (head.code != 0) {
    fail(Error(static_cast<ErrorCode>(head.code - 1), {Stage::group, rank_, head.blamed},
               std::string(reinterpret_cast<const char*>(packed.data()), packed.size())));
  }
  std::vector<Group::Bytes> all;
  std::size_t at = 0;
  for (int peer = 0; peer < size_; ++peer) {
    std::uint64_t size = 0;
    std::memcpy(&size, packed.data() + at, sizeof(size));
    at += sizeof(size);
    const auto begin = packed.begin() + static_cast<std::ptrdiff_t>(at);
    all.emplace_back(begin, begin + static_cast<std::ptrdiff_t>(size));
    at += size;
  }
  return all;
}

}  // namespace wherry
