#include "support/fd.hpp"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

namespace wherry {

Fd& Fd::operator=(Fd&& other) noexcept {
  std::swap(fd_, other.fd_);
  return *this;
}

Fd::~Fd() {
  if (fd_ >= 0) close(fd_);
}

bool wait_for(const Fd& fd, short events, Clock::time_point deadline) {
  for (;;) {
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
    pollfd p{fd.get(), events, 0};
    const int n = poll(&p, 1, static_cast<int>(std::clamp<long>(left, 0, 1000)));
    if (n > 0) return true;
    if (n < 0 && errno != EINTR) return false;
    if (left <= 0) return false;
  }
}

}  // namespace wherry
