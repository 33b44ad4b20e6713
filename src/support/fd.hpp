// An owned file descriptor, and a bounded wait for it.
#pragma once

#include "support/doorbell.hpp"

namespace wherry {

class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(other.fd_) { other.fd_ = -1; }
  Fd& operator=(Fd&& other) noexcept;
  ~Fd();
  [[nodiscard]] int get() const noexcept { return fd_; }
  [[nodiscard]] bool valid() const noexcept { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

// Waits for the events of poll(); false when the deadline has passed.
[[nodiscard]] bool wait_for(const Fd& fd, short events, Clock::time_point deadline);

}  // namespace wherry
