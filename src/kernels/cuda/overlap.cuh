// A kernel that is launched while the one before it in the stream still runs: its blocks are in place, with
// their arguments read, when that one ends. They wait for its end before they touch what it may write.
// Only where no other rank uses the GPU: its kernels may need the multiprocessors that the early blocks
// hold, and the running kernel may be waiting for those. sm_90 and later; elsewhere nothing happens.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

namespace wherry::kernels::cuda {

// All threads, before anything that earlier kernels write, also where the launch does not overlap.
__device__ inline void wait_for_earlier_kernels() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// When all blocks have called it the next kernel's blocks may come.
__device__ inline void let_next_kernel_begin() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

template <typename... Parameters, typename... Arguments>
cudaError_t launch_kernel(bool overlaps, void (*kernel)(Parameters...), dim3 grid, int threads,
                          std::size_t shared_bytes, cudaStream_t stream,
                          const Arguments&... arguments) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = overlaps ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

}  // namespace wherry::kernels::cuda
