// Picks the fabric by where the ranks are.
#include <unistd.h>

#include <cstring>
#include <string>

#include "fabric/fabric.hpp"
#include "support/check.hpp"
#include "support/host.hpp"

namespace wherry {

std::unique_ptr<Fabric> connect_fabric(const Group& group, const WindowRequest& request) {
  const std::string mine = fmt::format("{}/{}", host_identity(), getpid());
  const auto all = group.allgather(std::as_bytes(std::span(mine)));
  bool same_process = true;
  for (std::size_t peer = 0; peer < all.size(); ++peer) {
    const std::string theirs(reinterpret_cast<const char*>(all[peer].data()), all[peer].size());
    same_process = same_process && theirs == mine;
    WHERRY_CHECK(theirs.substr(0, theirs.find('/')) == host_identity(), ErrorCode::unsupported,
                 (Error::Where{Stage::startup, group.rank(), static_cast<int>(peer)}),
                 "rank {} is on another host; this build reaches ranks of one host only", peer);
  }
  return same_process ? connect_process(group, request) : connect_shm(group, request);
}

}  // namespace wherry
