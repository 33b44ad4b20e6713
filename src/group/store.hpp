// An allgather over sockets for ranks that something else has started: rank 0 is the hub, every
// other rank holds one connection to it. For start-up and agreement, not for rows.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "support/fd.hpp"
#include "wherry/error.hpp"
#include "wherry/group.hpp"

namespace wherry {

// Where the ranks meet: TCP at host:port, or a Unix socket of this host by an abstract name.
struct StoreAddress {
  std::string host;  // empty: `name` counts
  int port = 0;
  std::string name;

  [[nodiscard]] std::string text() const;  // for people
};

class Store {
 public:
  // Collective: returns when all ranks have come. Rank 0 listens, the others try until it does. What
  // one rank finds wrong (a rank that does not come, two with one number, another size) it tells
  // those that are connected, so all throw the same: timeout, peer_failed, bad_argument,
  // config_mismatch naming the rank; system where the address cannot be used.
  Store(int rank, int size, const StoreAddress& address, Seconds deadline);

  // Collective. Throws timeout or peer_failed naming the rank, on every rank; and again at every
  // later call.
  [[nodiscard]] std::vector<Group::Bytes> allgather(std::span<const std::byte> mine);

 private:
  void gather_peers(const StoreAddress& address);
  void join_hub(const StoreAddress& address);
  [[nodiscard]] std::vector<Group::Bytes> allgather_at_hub(std::span<const std::byte> mine);
  [[nodiscard]] std::vector<Group::Bytes> allgather_at_peer(std::span<const std::byte> mine);
  // Tells everybody that is connected, then throws.
  [[noreturn]] void fail(const Error& error);

  int rank_, size_;
  Seconds allowed_;
  std::vector<Fd>
      peers_;  // rank 0: a connection from every other rank; else peers_[0] is to rank 0
  std::optional<Error> failed_;
};

}  // namespace wherry
