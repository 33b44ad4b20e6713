// Ranks as processes of one host: a window is a memfd, passed to every peer over a Unix socket.
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

#include "fabric/addressable.hpp"
#include "fabric/fabric.hpp"
#include "fabric/shm/sockets.hpp"
#include "support/check.hpp"

namespace wherry {

namespace {

class ShmFabric final : public Fabric {
 public:
  ShmFabric(int rank, std::uint64_t bytes, std::vector<Fd> sockets)
      : rank_(rank),
        bytes_(bytes),
        windows_(sockets.size(), nullptr),
        sockets_(std::move(sockets)) {}
  ~ShmFabric() override {
    for (std::byte* window : windows_) unmap_window(window, bytes_);
  }

  void map(int peer, int fd, bool populate) {
    windows_[static_cast<std::size_t>(peer)] = map_window(fd, bytes_, populate);
  }

  [[nodiscard]] const Fd& socket(int peer) const noexcept {
    return sockets_[static_cast<std::size_t>(peer)];
  }

  [[nodiscard]] std::string_view name() const noexcept override { return "shm"; }
  [[nodiscard]] std::byte* window(int peer) const noexcept override {
    return windows_[static_cast<std::size_t>(peer)];
  }
  void signal(int peer, std::uint64_t offset, std::uint64_t value) override {
    signal_addressable(window(peer), offset, value);
  }
  // The socket is closed when the peer's process ends, however it ends.
  [[nodiscard]] bool alive(int peer) override {
    return peer == rank_ || !shm::hung_up(sockets_[static_cast<std::size_t>(peer)]);
  }

 private:
  int rank_;
  std::uint64_t bytes_;
  std::vector<std::byte*> windows_;
  std::vector<Fd> sockets_;
};

Fd make_memory(std::uint64_t bytes, int rank) {
  const Error::Where where{Stage::startup, rank, -1};
  Fd fd(memfd_create("wherry-window", MFD_CLOEXEC));
  WHERRY_CHECK(fd.valid(), ErrorCode::system, where, "memfd_create: {}", std::strerror(errno));
  WHERRY_CHECK(ftruncate(fd.get(), static_cast<off_t>(bytes)) == 0, ErrorCode::out_of_memory, where,
               "no memory for a window of {} bytes: {}", bytes, std::strerror(errno));
  return fd;
}

// Runs `step` on every rank, then tells all ranks whether it worked everywhere; without this a
// rank short of memory would leave the others waiting.
template <typename Step>
void agreed(const Group& group, Step step) {
  std::string problem;
  ErrorCode code = ErrorCode::internal;
  try {
    step();
  } catch (const Error& error) {
    problem = error.message();
    code = error.code();
  }
  std::string wire(1, static_cast<char>(code));
  if (!problem.empty()) wire += problem;
  const auto all = group.allgather(std::as_bytes(std::span(wire)));
  for (std::size_t peer = 0; peer < all.size(); ++peer) {
    if (all[peer].size() <= 1) continue;
    throw Error(
        static_cast<ErrorCode>(all[peer][0]),
        {Stage::startup, group.rank(), static_cast<int>(peer)},
        std::string(reinterpret_cast<const char*>(all[peer].data()) + 1, all[peer].size() - 1));
  }
}

}  // namespace

std::unique_ptr<Fabric> connect_shm(const Group& group, const WindowRequest& request) {
  const int rank = group.rank();
  auto fabric =
      std::make_unique<ShmFabric>(rank, request.bytes, shm::connect_all(group, request.deadline));
  const auto until = Clock::now() + std::chrono::duration_cast<Clock::duration>(request.deadline);

  Fd memory;
  agreed(group, [&] {
    memory = make_memory(request.bytes, rank);
    fabric->map(rank, memory.get(), request.populate);
  });
  agreed(group, [&] {
    for (int peer = 0; peer < group.size(); ++peer) {
      if (peer != rank) shm::send_fd(fabric->socket(peer), memory.get(), rank, peer);
    }
    for (int peer = 0; peer < group.size(); ++peer) {
      if (peer == rank) continue;
      const Fd fd = shm::receive_fd(fabric->socket(peer), rank, peer, until);
      fabric->map(peer, fd.get(), request.populate);
    }
  });
  return fabric;
}

}  // namespace wherry
