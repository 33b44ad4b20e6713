// The second seam (the first is kernels): how bytes and signals reach the window of a peer.
//
// A fabric owns this rank's window and whatever makes the peers' windows reachable. Where a peer's
// window is addressable, kernels write rows into it directly and the fabric only carries signals.
// Adding one: a folder with the same file names, and a line in connect_fabric().
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string_view>

#include "wherry/group.hpp"

namespace wherry {

class Fabric {
 public:
  Fabric() = default;
  virtual ~Fabric() = default;
  Fabric(const Fabric&) = delete;
  Fabric& operator=(const Fabric&) = delete;

  [[nodiscard]] virtual std::string_view name() const noexcept = 0;

  // This rank's address of a peer's window (its own for peer == rank). Zeroed at construction.
  [[nodiscard]] virtual std::byte* window(int peer) const noexcept = 0;

  // Strong signal: stores `value` in the word at `offset` of the peer's window so that all earlier
  // writes of this thread to that peer are visible to whoever reads the value, and wakes it.
  virtual void signal(int peer, std::uint64_t offset, std::uint64_t value) = 0;

  // False once the peer is known to be gone (dead, or its end of the fabric destroyed).
  [[nodiscard]] virtual bool alive(int peer) = 0;
};

struct WindowRequest {
  std::uint64_t bytes = 0;
  bool populate = false;  // touch every page now
  Seconds deadline = kDefaultDeadline;
  std::span<std::byte> memory = {};  // cuda_peer: the caller's, for this rank's window; empty: none
};

using ConnectFn = std::function<std::unique_ptr<Fabric>(const Group&, const WindowRequest&)>;

// Collective. Picks the fabric by where the ranks are: one process -> `process`, one host -> `shm`.
// Throws unsupported for ranks on several hosts, out_of_memory, timeout, peer_failed, system.
[[nodiscard]] std::unique_ptr<Fabric> connect_fabric(const Group& group,
                                                     const WindowRequest& request);

[[nodiscard]] std::unique_ptr<Fabric> connect_process(const Group& group,
                                                      const WindowRequest& request);
[[nodiscard]] std::unique_ptr<Fabric> connect_shm(const Group& group, const WindowRequest& request);

}  // namespace wherry
