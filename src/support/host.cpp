#include "support/host.hpp"

#include <fstream>

namespace wherry {

std::string host_identity() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  return boot;
}

}  // namespace wherry
