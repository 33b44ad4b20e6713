// Which SIMD kernel sets this build and this machine have.
#include "kernels/cpu/cpu.hpp"
#include "kernels/cpu/targets.hpp"
#include "kernels/reference/reference.hpp"

#include <hwy/highway.h>

namespace wherry::kernels::cpu {

std::vector<KernelSet> sets() {
  std::vector<KernelSet> result;
  for (const Target& target : kTargets) {
    if ((hwy::SupportedTargets() & HWY_TARGETS & target.bits) == 0) continue;
    result.push_back({target.name, dispatch_send_for(target.bits), reference::dispatch_recv,
                      combine_send_for(target.bits), combine_recv_for(target.bits),
                      quantize_row_for(target.bits), dequantize_row_for(target.bits)});
  }
  return result;
}

}  // namespace wherry::kernels::cpu
