// What this machine is, as far as the command line says or decides something by it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace wherry::cli {

// Cores this process may run on.
[[nodiscard]] int num_cores();

[[nodiscard]] std::uint64_t total_memory();  // bytes of RAM

struct CpuFeature {
  std::string name;    // as /proc/cpuinfo has it
  std::string serves;  // what Wherry or its libraries do with it
  bool present = false;
};
struct Cpu {
  std::string model;
  std::vector<CpuFeature> features;
};
[[nodiscard]] Cpu cpu();

}  // namespace wherry::cli
