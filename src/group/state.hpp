// What a Group is made of. Internal.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "fabric/fabric.hpp"
#include "wherry/group.hpp"

namespace wherry::detail {

struct GroupState {
  int rank = 0;
  int size = 1;
  Group::AllgatherFn allgather;
  std::vector<bool> beside = {};  // ranks on this one's only processor; empty: none known
  // Maps a window on every rank. Tests replace it to put a decorator around the real fabric.
  ConnectFn connect = connect_fabric;
};

}  // namespace wherry::detail
