// A fabric for tests that decorates a real one: it calls a script before and after every signal,
// and the script may delay, drop, stop or kill. Linked only into tests.
#pragma once

#include <functional>

#include "fabric/fabric.hpp"
#include "kernels/layout.hpp"

namespace wherry {

// What is about to happen, or has just happened.
struct SignalEvent {
  int rank = 0;  // the sender
  int peer = 0;  // the receiver
  layout::Channel channel = layout::Channel::counts;
  std::uint64_t generation = 0;
  std::uint32_t epoch = 0;
  std::uint64_t ordinal = 0;  // how many signals this rank has sent on this channel before
};

struct FaultScript {
  // Returns false to drop the signal.
  std::function<bool(const SignalEvent&)> before = [](const SignalEvent&) { return true; };
  // Sends a signal that was not dropped: now, or later and on another thread.
  std::function<void(const SignalEvent&, std::function<void()> send)> deliver =
      [](const SignalEvent&, const std::function<void()>& send) { send(); };
  std::function<void(const SignalEvent&)> after = [](const SignalEvent&) {};
};

// Every fabric that `group` connects from now on is decorated. `layout` must be the window layout of
// the exchange that will be built: it tells which word belongs to which channel.
void make_faulty(Group& group, const layout::WindowLayout& layout, FaultScript script);

}  // namespace wherry
