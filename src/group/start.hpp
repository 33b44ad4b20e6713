// Which rank this process is and where the ranks meet, as launchers say it in the environment.
#pragma once

#include <functional>
#include <string>

#include "group/store.hpp"

namespace wherry {

struct Start {
  int rank = 0;
  int size = 1;
  StoreAddress address;
};

// The value of an environment variable, or null.
using Environment = std::function<const char*(const char* name)>;

// Throws bad_argument naming the variable, its value and what is allowed. `job` names this launch
// where the environment does not (processes of one launcher on one host share their parent).
[[nodiscard]] Start start_from(const Environment& get, const std::string& job);

}  // namespace wherry
