// What a Group is made of. Internal.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "fabric/fabric.hpp"
#include "wherry/group.hpp"

namespace wherry::detail {

struct GroupState {
  int rank = 0;
  int size = 1;
  Group::AllgatherFn allgather;
  std::string meeting =
      {};  // names a place of this host where subgroups meet; empty: there is none
  std::map<std::vector<int>, int> subgroups = {};  // how many of each list have been made
  std::vector<bool> beside = {};  // ranks on this one's only processor; empty: none known
  // Maps a window on every rank. Tests replace it to put a decorator around the real fabric.
  ConnectFn connect = connect_fabric;
};

// A name that no other group has, for GroupState::meeting.
[[nodiscard]] std::string new_meeting();

}  // namespace wherry::detail
