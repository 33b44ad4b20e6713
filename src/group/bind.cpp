#include "group/bind.hpp"

#include <sched.h>

#include <algorithm>

#include "support/doorbell.hpp"

#if WHERRY_HAS_NUMA
#include <hwloc.h>

#include <memory>
#include <type_traits>
#endif

namespace wherry {

namespace {

std::vector<int> allowed_cpus() {
  cpu_set_t allowed;
  std::vector<int> cpus;
  if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return cpus;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(static_cast<std::size_t>(cpu), &allowed)) cpus.push_back(cpu);
  }
  return cpus;
}

#if WHERRY_HAS_NUMA
// All processors, neighbours next to each other; empty if the machine cannot be read.
std::vector<int> cpus_by_topology(const std::string& synthetic) {
  hwloc_topology_t topology = nullptr;
  if (hwloc_topology_init(&topology) != 0) return {};
  const auto destroy = [](hwloc_topology_t t) { hwloc_topology_destroy(t); };
  const std::unique_ptr<std::remove_pointer_t<hwloc_topology_t>, decltype(destroy)> owner(topology,
                                                                                          destroy);
  if (!synthetic.empty() && hwloc_topology_set_synthetic(topology, synthetic.c_str()) != 0) {
    return {};
  }
  if (hwloc_topology_load(topology) != 0) return {};
  std::vector<int> cpus;
  for (hwloc_obj_t pu = nullptr;
       (pu = hwloc_get_next_obj_by_type(topology, HWLOC_OBJ_PU, pu)) != nullptr;) {
    cpus.push_back(static_cast<int>(pu->os_index));
  }
  return cpus;
}
#endif

}  // namespace

std::vector<int> share_of_cpus(const std::vector<int>& cpus, int rank, int ranks) {
  const int count = static_cast<int>(cpus.size());
  if (count == 0) return {};
  const int begin = rank * count / ranks;
  const int end = std::max(begin + 1, (rank + 1) * count / ranks);
  return {cpus.begin() + begin, cpus.begin() + end};
}

std::vector<int> usable_cpus([[maybe_unused]] const std::string& synthetic) {
#if WHERRY_HAS_NUMA
  std::vector<int> cpus = cpus_by_topology(synthetic);
  if (!synthetic.empty()) return cpus;
  const std::vector<int> allowed = allowed_cpus();
  std::erase_if(cpus, [&](int cpu) {
    return std::find(allowed.begin(), allowed.end(), cpu) == allowed.end();
  });
  if (!cpus.empty()) return cpus;
#endif
  return allowed_cpus();
}

std::vector<bool> bind_rank(int rank, int ranks) {
  const std::vector<int> usable = usable_cpus();
  const std::vector<int> cpus = share_of_cpus(usable, rank, ranks);
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int cpu : cpus) CPU_SET(static_cast<std::size_t>(cpu), &set);
  if (cpus.empty() || sched_setaffinity(0, sizeof(set), &set) != 0) return {};
  const sched_param param{};
  if (sched_getscheduler(0) == SCHED_OTHER) sched_setscheduler(0, SCHED_BATCH, &param);
  Doorbell::wait_bound();
  std::vector<bool> beside(static_cast<std::size_t>(ranks), false);
  for (int peer = 0; peer < ranks && cpus.size() == 1; ++peer) {
    beside[static_cast<std::size_t>(peer)] =
        peer != rank && share_of_cpus(usable, peer, ranks) == cpus;
  }
  return beside;
}

}  // namespace wherry
