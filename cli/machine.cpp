#include "machine.hpp"

#include <sched.h>
#include <unistd.h>

#include <fstream>
#include <set>
#include <sstream>

namespace wherry::cli {

int num_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return CPU_COUNT(&set);
  return static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));  // more than 1024 cores
}

std::uint64_t total_memory() {
  return static_cast<std::uint64_t>(sysconf(_SC_PHYS_PAGES)) *
         static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
}

Cpu cpu() {
  Cpu result{.model = "unknown",
             .features = {{"avx2", "kernels: 256-bit SIMD"},
                          {"fma", "kernels: fused multiply-add"},
                          {"avx512f", "kernels: 512-bit SIMD"},
                          {"avx512_bf16", "experts: bf16 products"},
                          {"amx_bf16", "experts: bf16 matrix units"}}};
  // The kernel lists a flag only if it also lets programs use the registers.
  std::set<std::string> flags;
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line) && flags.empty();) {
    const std::size_t colon = line.find(':');
    if (colon == std::string::npos || colon + 2 > line.size()) continue;
    const std::string value = line.substr(colon + 2);
    if (line.starts_with("model name")) result.model = value;
    if (!line.starts_with("flags")) continue;
    std::istringstream words(value);
    for (std::string word; words >> word;) flags.insert(word);
  }
  for (CpuFeature& feature : result.features) feature.present = flags.contains(feature.name);
  return result;
}

}  // namespace wherry::cli
