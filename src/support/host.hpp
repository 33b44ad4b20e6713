// Which host this is.
#pragma once

#include <string>

namespace wherry {

// Equal exactly for processes that run on the same booted kernel. No '/' in it.
[[nodiscard]] std::string host_identity();

}  // namespace wherry
