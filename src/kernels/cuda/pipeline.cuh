// Bulk (TMA) copies and the mbarriers that tell when they have landed; sm_90 and later. The only
// file that holds PTX for them.
#pragma once

#include <cstdint>

namespace wherry::kernels::cuda {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define WHERRY_HAS_BULK_COPY 1
#endif

#ifdef WHERRY_HAS_BULK_COPY

// Shared memory addresses as the instructions below take them.
__device__ inline std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ inline void barrier_init(std::uint32_t barrier, std::uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// After barrier_init, before a bulk copy may signal the barrier.
__device__ inline void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// Arrives, and makes the phase last until `bytes` have been copied as well.
__device__ inline void barrier_expect_bytes(std::uint32_t barrier, std::uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
__device__ inline void barrier_wait(std::uint32_t barrier, std::uint32_t parity) {
  std::uint32_t done = 0;
  while (done == 0) {
    asm volatile(
        "{\n .reg .pred complete;\n"
        " mbarrier.try_wait.parity.shared::cta.b64 complete, [%1], %2;\n"
        " selp.u32 %0, 1, 0, complete;\n}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  }
}

// Ordinary writes of this thread to shared memory become visible to bulk copies it issues later.
__device__ inline void fence_shared_to_bulk() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// What this thread has acquired becomes visible to bulk loads it issues later.
__device__ inline void fence_acquired_to_bulk() { asm volatile("fence.proxy.async;" ::: "memory"); }

// Sizes and addresses are multiples of 16 bytes.
__device__ inline void bulk_load(std::uint32_t to_shared, const void* from, std::uint32_t bytes,
                                 std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to_shared),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}
// Rows that do not fit into the second-level cache are the first to go from it, so that other things stay
// (1 % at 8 ranks x 16 SMs; decode with 128 tokens 30.2 -> 27.6 us). Others stay, since they are read soon.
__device__ inline void bulk_store(void* to, std::uint32_t from_shared, std::uint32_t bytes,
                                  bool stays) {
  std::uint64_t first_to_go;
  std::uint64_t kept;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(first_to_go));
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(kept));
  asm volatile(
      "cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;" ::"l"(to),
      "r"(from_shared), "r"(bytes), "l"(stays ? kept : first_to_go)
      : "memory");
}
__device__ inline void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until at most kGroups of this thread's groups have still to read their shared memory.
template <int kGroups>
__device__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kGroups) : "memory");
}
// Until all of this thread's stores have been written: what a signal may follow.
__device__ inline void bulk_wait_written() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

#endif  // WHERRY_HAS_BULK_COPY

}  // namespace wherry::kernels::cuda
