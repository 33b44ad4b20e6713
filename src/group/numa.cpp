#include "group/numa.hpp"

#include <algorithm>

#if WHERRY_HAS_NUMA
#include <hwloc.h>

#include <memory>
#endif

namespace wherry {

std::vector<int> nodes_of_rank(int rank, int ranks, int nodes) {
  const int begin = rank * nodes / ranks;
  const int end = std::max(begin + 1, (rank + 1) * nodes / ranks);
  std::vector<int> result;
  for (int node = begin; node < end; ++node) result.push_back(node);
  return result;
}

#if WHERRY_HAS_NUMA

namespace {

struct TopologyDeleter {
  void operator()(hwloc_topology_t topology) const { hwloc_topology_destroy(topology); }
};
using Topology = std::unique_ptr<std::remove_pointer_t<hwloc_topology_t>, TopologyDeleter>;
struct BitmapDeleter {
  void operator()(hwloc_bitmap_t bitmap) const { hwloc_bitmap_free(bitmap); }
};
using Bitmap = std::unique_ptr<std::remove_pointer_t<hwloc_bitmap_t>, BitmapDeleter>;

Topology load(const std::string& synthetic) {
  hwloc_topology_t topology = nullptr;
  if (hwloc_topology_init(&topology) != 0) return nullptr;
  Topology owned(topology);
  if (!synthetic.empty() && hwloc_topology_set_synthetic(topology, synthetic.c_str()) != 0) {
    return nullptr;
  }
  return hwloc_topology_load(topology) == 0 ? std::move(owned) : nullptr;
}

}  // namespace

std::vector<int> bind_rank(int rank, int ranks, const std::string& topology) {
  const Topology machine = load(topology);
  if (machine == nullptr) return {};
  const int nodes = hwloc_get_nbobjs_by_type(machine.get(), HWLOC_OBJ_NUMANODE);
  if (nodes < 2) return {};
  const Bitmap cpus(hwloc_bitmap_alloc());
  for (const int node : nodes_of_rank(rank, ranks, nodes)) {
    const hwloc_obj_t object =
        hwloc_get_obj_by_type(machine.get(), HWLOC_OBJ_NUMANODE, static_cast<unsigned>(node));
    hwloc_bitmap_or(cpus.get(), cpus.get(), object->cpuset);
  }
  std::vector<int> chosen;
  for (int cpu = hwloc_bitmap_first(cpus.get()); cpu >= 0;
       cpu = hwloc_bitmap_next(cpus.get(), cpu)) {
    chosen.push_back(cpu);
  }
  // A node of memory alone has no processors: nothing to bind to.
  if (!chosen.empty()) hwloc_set_cpubind(machine.get(), cpus.get(), HWLOC_CPUBIND_THREAD);
  return chosen;
}

#else

std::vector<int> bind_rank(int, int, const std::string&) { return {}; }

#endif

}  // namespace wherry
