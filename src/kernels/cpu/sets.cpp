// Which SIMD kernel sets this build and this machine have.
#include "kernels/cpu/cpu.hpp"
#include "kernels/cpu/targets.hpp"
#include "kernels/reference/reference.hpp"

#include <hwy/highway.h>

namespace wherry::kernels::cpu {

std::vector<KernelSet> sets() {
  // Names are ours: a user pins one with WHERRY_KERNELS.
  struct Named {
    std::int64_t target;
    std::string_view name;
  };
  constexpr Named kTargets[] = {{HWY_AVX3, "avx512"}, {HWY_AVX2, "avx2"}, {HWY_NEON, "neon"}};
  std::vector<KernelSet> result;
  for (const Named& named : kTargets) {
    if ((hwy::SupportedTargets() & HWY_TARGETS & named.target) == 0) continue;
    result.push_back({named.name, dispatch_send_for(named.target), reference::dispatch_recv,
                      combine_send_for(named.target), combine_recv_for(named.target),
                      copy_row_for(named.target)});
  }
  return result;
}

}  // namespace wherry::kernels::cpu
