// Which kernel sets there are, and how one is chosen.
#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <string>
#include <vector>

#include "kernels/cpu/cpu.hpp"
#include "kernels/reference/reference.hpp"
#include "kernels/stages.hpp"
#include "support/check.hpp"

namespace wherry::kernels {

namespace {

constexpr KernelSet kReference{"reference",
                               reference::dispatch_send,
                               reference::dispatch_recv,
                               reference::combine_send,
                               reference::combine_recv,
                               reference::quantize_row,
                               reference::dequantize_row};

std::string_view from_environment() {
  const char* name = std::getenv("WHERRY_KERNELS");
  return name != nullptr ? name : "";
}

}  // namespace

std::span<const KernelSet> available() {
  static const std::vector<KernelSet> sets = [] {
    std::vector<KernelSet> all = cpu::sets();
    all.push_back(kReference);
    return all;
  }();
  return sets;
}

bool is_on_cuda(std::string_view name) {
  return std::ranges::find(kOnCuda, name) != std::end(kOnCuda);
}

std::string_view from_environment_on_cuda() {
  const std::string_view name = from_environment();
  const bool of_cpu =
      std::ranges::any_of(available(), [name](const KernelSet& set) { return set.name == name; });
  return of_cpu ? std::string_view{} : name;
}

const KernelSet& find(std::string_view name) {
  if (name.empty() && !is_on_cuda(from_environment())) name = from_environment();
  const std::span<const KernelSet> sets = available();
  if (name.empty()) return sets.front();
  std::string names;
  for (const KernelSet& set : sets) {
    if (set.name == name) return set;
    names += names.empty() ? "" : ", ";
    names += set.name;
  }
  throw Error(ErrorCode::unsupported, {Stage::startup, -1, -1},
              fmt::format("no kernel set is named '{}'; this machine has: {}", name, names));
}

}  // namespace wherry::kernels
