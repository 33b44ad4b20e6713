#include "link.hpp"

#include <algorithm>
#include <cstdint>

#include "kernels/cuda/pipeline.cuh"
#include "kernels/cuda/signals.cuh"
#include "support/cuda.hpp"

namespace wherry::bench {

namespace {

namespace kernel = kernels::cuda;

constexpr Error::Where kWhere{};
#define CUDA_OK(call) ::wherry::cuda::check((call), kWhere, #call)

constexpr int kThreads = 512;
constexpr std::size_t kBytes = std::size_t{256} << 20;
constexpr std::uint32_t kPieceBytes = 7168;
constexpr std::uint32_t kPieces = 32;  // 224 KiB in flight in each block
constexpr int kRepetitions = 7;

// 16 bytes a thread, eight in flight; who is far decides whether it is a push or a pull.
__global__ void __launch_bounds__(kThreads)
    copy_units(uint4* to, const uint4* from, std::size_t units) {
  constexpr int kInFlight = 8;
  const std::size_t threads = std::size_t{gridDim.x} * kThreads;
  std::size_t at = std::size_t{blockIdx.x} * kThreads + threadIdx.x;
  for (; at + (kInFlight - 1) * threads < units; at += kInFlight * threads) {
    uint4 held[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) held[i] = __ldcs(from + at + i * threads);
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) __stcs(to + at + i * threads, held[i]);
  }
  for (; at < units; at += threads) to[at] = from[at];
}

// Pieces that warps of the running copy have taken, and warps that are done; both 0 again behind it.
struct Shares {
  std::uint32_t taken;
  std::uint32_t done;
};

// Four warps of a block, each with an elected lane and eight pieces. After those each warp takes a piece when it is
// ready for one: with equal shares the time is that of the multiprocessor that gets least of the link. `also`: a
// second place for what is read once, or null.
__global__ void __launch_bounds__(kThreads)
    copy_bulk(std::byte* to, std::byte* also, const std::byte* from, std::size_t bytes,
              Shares* shares) {
#ifdef WHERRY_HAS_BULK_COPY
  constexpr std::uint32_t kWarps = 4;
  constexpr std::uint32_t kStages = kPieces / kWarps;
  constexpr std::uint32_t kStoresInFlight = 2;
  extern __shared__ __align__(128) std::byte staging[];
  __shared__ __align__(8) std::uint64_t barriers[kPieces];
  const std::uint32_t warp = threadIdx.x / 32;
  if (warp >= kWarps || threadIdx.x % 32 != 0) return;
  const std::uint32_t mine = kernel::shared_address(staging) + warp * kStages * kPieceBytes;
  const std::uint32_t full = kernel::shared_address(barriers) + 8 * warp * kStages;
  const auto pieces = static_cast<std::uint32_t>(bytes / kPieceBytes);
  const std::uint32_t first = blockIdx.x * kWarps + warp;
  const std::uint32_t stride = gridDim.x * kWarps;
  std::uint32_t item_of[kStages] = {};
  const auto load = [&](std::uint32_t stage) {
    const std::uint32_t item = item_of[stage];
    if (item >= pieces) return;
    kernel::barrier_expect_bytes(full + 8 * stage, kPieceBytes);
    kernel::bulk_load(mine + stage * kPieceBytes, from + std::size_t{item} * kPieceBytes,
                      kPieceBytes, full + 8 * stage);
  };
  for (std::uint32_t stage = 0; stage < kStages; ++stage) kernel::barrier_init(full + 8 * stage, 1);
  kernel::barrier_init_fence();
  for (std::uint32_t stage = 0; stage < kStages; ++stage) {
    item_of[stage] = first + stage * stride;
    load(stage);
  }
  std::uint32_t taken = kernel::count_gpu(&shares->taken);
  for (std::uint32_t index = 0;; ++index) {
    const std::uint32_t stage = index % kStages;
    const std::uint32_t item = item_of[stage];
    if (item >= pieces) break;
    kernel::barrier_wait(full + 8 * stage, index / kStages & 1U);
    for (std::byte* place : {to, also}) {
      if (place == nullptr) continue;
      kernel::bulk_store(place + std::size_t{item} * kPieceBytes, mine + stage * kPieceBytes,
                         kPieceBytes, false);
    }
    kernel::bulk_commit();
    kernel::bulk_wait_read<kStoresInFlight>();
    if (index < kStoresInFlight) continue;
    const std::uint32_t coming = (index - kStoresInFlight) % kStages;
    item_of[coming] = kStages * stride + taken;
    if (item_of[coming] >= pieces) continue;
    load(coming);
    taken = kernel::count_gpu(&shares->taken);
  }
  kernel::bulk_wait_written();
  if (atomicInc(&shares->done, gridDim.x * kWarps - 1) == gridDim.x * kWarps - 1) shares->taken = 0;
#endif
}

// `turns` times a word goes from one GPU to the other, which answers.
__global__ void play(std::uint64_t* mine, std::uint64_t* theirs, bool begins, int turns,
                     bool ordered) {
  for (int turn = 1; turn <= turns; ++turn) {
    const auto word = static_cast<std::uint64_t>(turn);
    if (!begins) {
      while ((ordered ? kernel::load_acquire_system(mine) : kernel::load_relaxed_system(mine)) <
             word) {
      }
    }
    if (ordered) kernel::fence_system();
    kernel::store_signal_after_fence(theirs, word);
    if (begins) {
      while ((ordered ? kernel::load_acquire_system(mine) : kernel::load_relaxed_system(mine)) <
             word) {
      }
    }
  }
}

struct Gpu {
  cudaStream_t stream = nullptr;
  cudaEvent_t begin = nullptr, end = nullptr;
  cuda::DeviceMemory from, to, also, shares;
};

class Pair {
 public:
  Pair() {
    for (int at = 0; at < 2; ++at) {
      Gpu& gpu = gpus[at];
      CUDA_OK(cudaSetDevice(at));
      CUDA_OK(cudaStreamCreateWithFlags(&gpu.stream, cudaStreamNonBlocking));
      CUDA_OK(cudaEventCreate(&gpu.begin));
      CUDA_OK(cudaEventCreate(&gpu.end));
      gpu.from = cuda::DeviceMemory(at, kBytes);
      gpu.to = cuda::DeviceMemory(at, kBytes);
      gpu.also = cuda::DeviceMemory(at, kBytes);
      gpu.shares = cuda::DeviceMemory(at, sizeof(Shares));
      CUDA_OK(cudaMemset(gpu.shares.get(), 0, sizeof(Shares)));
      const cudaError_t enabled = cudaDeviceEnablePeerAccess(1 - at, 0);
      if (enabled == cudaErrorPeerAccessAlreadyEnabled) {
        static_cast<void>(cudaGetLastError());
      } else {
        CUDA_OK(enabled);
      }
      CUDA_OK(cudaFuncSetAttribute(copy_bulk, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   static_cast<int>(kPieces * kPieceBytes)));
    }
  }
  ~Pair() {
    for (int at = 0; at < 2; ++at) {
      static_cast<void>(cudaSetDevice(at));
      static_cast<void>(cudaEventDestroy(gpus[at].begin));
      static_cast<void>(cudaEventDestroy(gpus[at].end));
      static_cast<void>(cudaStreamDestroy(gpus[at].stream));
    }
  }
  Pair(const Pair&) = delete;
  Pair& operator=(const Pair&) = delete;

  // Median microseconds of the slower of the first `count` GPUs, each running launch(at).
  template <typename Launch>
  double time(int count, const Launch& launch) {
    std::vector<float> times;
    for (int i = 0; i < kRepetitions + 2; ++i) {
      for (int at = 0; at < count; ++at) {
        CUDA_OK(cudaSetDevice(at));
        CUDA_OK(cudaEventRecord(gpus[at].begin, gpus[at].stream));
        launch(at);
        CUDA_OK(cudaGetLastError());
        CUDA_OK(cudaEventRecord(gpus[at].end, gpus[at].stream));
      }
      float slowest = 0.0F;
      for (int at = 0; at < count; ++at) {
        CUDA_OK(cudaEventSynchronize(gpus[at].end));
        float ms = 0.0F;
        CUDA_OK(cudaEventElapsedTime(&ms, gpus[at].begin, gpus[at].end));
        slowest = std::max(slowest, ms * 1000.0F);
      }
      if (i >= 2) times.push_back(slowest);
    }
    std::sort(times.begin(), times.end());
    return static_cast<double>(times[times.size() / 2]);
  }

  Gpu gpus[2];
};

enum class Way { push, pull, home, push_and_home };

}  // namespace

double best_copy(const std::vector<LinkRate>& rates) {
  double best = 0.0;
  for (const LinkRate& rate : rates) {
    // One of those across the link, by a kernel.
    if (rate.how == "engine" || rate.how.ends_with("home")) continue;
    best = std::max(best, rate.both_ways);
  }
  return best;
}

std::vector<LinkRate> measure_link() {
  Pair pair;
  std::vector<LinkRate> rates;
  const auto gbps = [](double us) { return static_cast<double>(kBytes) / us / 1e3; };
  const auto both = [&](const char* how, int blocks, const auto& launch) {
    const double one = pair.time(1, launch);
    rates.push_back({how, blocks, gbps(one), gbps(pair.time(2, launch))});
  };
  both("engine", 0, [&](int at) {
    CUDA_OK(cudaMemcpyPeerAsync(pair.gpus[1 - at].to.get(), 1 - at, pair.gpus[at].from.get(), at,
                                kBytes, pair.gpus[at].stream));
  });
  for (const Way way : {Way::push, Way::pull, Way::home, Way::push_and_home}) {
    for (const bool bulk : {true, false}) {
      const bool at_home = way == Way::home || way == Way::push_and_home;
      if (at_home && !bulk) continue;
      for (const int blocks : {4, 8, 12, 16, 24, 32, 64, 132}) {
        if (at_home && blocks > 16) continue;
        const char* how = way == Way::home            ? "bulk store at home"
                          : way == Way::push_and_home ? "bulk store there and at home"
                          : way == Way::push          ? (bulk ? "bulk store" : "16-byte store")
                                                      : (bulk ? "bulk load" : "16-byte load");
        both(how, blocks, [&](int at) {
          const Gpu& here = pair.gpus[at];
          const Gpu& there = pair.gpus[1 - at];
          const bool pushes = way == Way::push || way == Way::push_and_home;
          std::byte* const to = (pushes ? there : here).to.get();
          std::byte* const also = way == Way::push_and_home ? here.also.get() : nullptr;
          const std::byte* const from = (way == Way::pull ? there : here).from.get();
          if (bulk) {
            copy_bulk<<<blocks, kThreads, kPieces * kPieceBytes, here.stream>>>(
                to, also, from, kBytes, reinterpret_cast<Shares*>(here.shares.get()));
          } else {
            copy_units<<<blocks, kThreads, 0, here.stream>>>(reinterpret_cast<uint4*>(to),
                                                             reinterpret_cast<const uint4*>(from),
                                                             kBytes / sizeof(uint4));
          }
        });
      }
    }
  }
  return rates;
}

RoundTrip measure_round_trip() {
  constexpr int kTurns = 2000;
  Pair pair;
  const auto us = [&](bool ordered) {
    std::vector<double> times;
    for (int i = 0; i < 3; ++i) {
      for (Gpu& gpu : pair.gpus) CUDA_OK(cudaMemset(gpu.to.get(), 0, sizeof(std::uint64_t)));
      CUDA_OK(cudaDeviceSynchronize());
      for (int at = 0; at < 2; ++at) {
        CUDA_OK(cudaSetDevice(at));
        const Gpu& gpu = pair.gpus[at];
        CUDA_OK(cudaEventRecord(gpu.begin, gpu.stream));
        play<<<1, 1, 0, gpu.stream>>>(reinterpret_cast<std::uint64_t*>(gpu.to.get()),
                                      reinterpret_cast<std::uint64_t*>(pair.gpus[1 - at].to.get()),
                                      at == 0, kTurns, ordered);
        CUDA_OK(cudaGetLastError());
        CUDA_OK(cudaEventRecord(gpu.end, gpu.stream));
      }
      // The second one was launched later and waits for nobody longer than the turns take.
      CUDA_OK(cudaEventSynchronize(pair.gpus[0].end));
      CUDA_OK(cudaEventSynchronize(pair.gpus[1].end));
      float ms = 0.0F;
      CUDA_OK(cudaEventElapsedTime(&ms, pair.gpus[1].begin, pair.gpus[1].end));
      times.push_back(static_cast<double>(ms) * 1e3 / kTurns);
    }
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
  };
  return {us(false), us(true)};
}

}  // namespace wherry::bench
