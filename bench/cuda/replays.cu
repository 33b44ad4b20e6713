#include "replays.hpp"

#include <algorithm>
#include <cstdint>

#include "support/cuda.hpp"

namespace wherry::bench {

namespace {

constexpr Error::Where kWhere{};
#define CUDA_OK(call) ::wherry::cuda::check((call), kWhere, #call)

class Event {
 public:
  Event() { CUDA_OK(cudaEventCreate(&event_)); }
  ~Event() { static_cast<void>(cudaEventDestroy(event_)); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  [[nodiscard]] cudaEvent_t get() const { return event_; }
  [[nodiscard]] float us_since(const Event& earlier) const {
    float ms = 0;
    CUDA_OK(cudaEventElapsedTime(&ms, earlier.get(), get()));
    return ms * 1000.0F;
  }

 private:
  cudaEvent_t event_ = nullptr;
};

__global__ void stamp(std::uint64_t* to) {
  std::uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  *to = now;
}

}  // namespace

const char* name(RanksAs ranks_as) {
  switch (ranks_as) {
    case RanksAs::processes: return "processes";
    case RanksAs::threads: return "threads";
    case RanksAs::gpus: return "one a GPU";
  }
  return "";
}

float median(std::vector<float> values) {
  std::ranges::sort(values);
  return values.empty() ? 0.0F : values[values.size() / 2];
}

double copy_rate() {
  constexpr std::size_t kBytes = std::size_t{2} << 30;
  int device = 0;
  CUDA_OK(cudaGetDevice(&device));
  const cuda::DeviceMemory from(device, kBytes);
  const cuda::DeviceMemory to(device, kBytes);
  const Event begin, end;
  std::vector<float> times;
  for (int i = 0; i < 60; ++i) {  // the first ones wake the memory's clock up
    CUDA_OK(cudaEventRecord(begin.get(), nullptr));
    CUDA_OK(cudaMemcpyAsync(to.get(), from.get(), kBytes, cudaMemcpyDeviceToDevice, nullptr));
    CUDA_OK(cudaEventRecord(end.get(), nullptr));
    CUDA_OK(cudaEventSynchronize(end.get()));
    if (i >= 30) times.push_back(end.us_since(begin));
  }
  return 2.0 * static_cast<double>(kBytes) / static_cast<double>(median(times)) / 1e3;
}

Times Replays::time(int steps, int replays, bool apart, const Calls& first, const Calls& second) {
  constexpr int kMarks = 4;  // a step: before first, after it, after second, and once more
  const bool leads = ranks_as_ != RanksAs::threads || rank_ == 0;
  int device = 0;
  CUDA_OK(cudaGetDevice(&device));
  std::vector<std::uint64_t> stamps(static_cast<std::size_t>(apart ? kMarks * steps : 0));
  const cuda::DeviceMemory memory(device, stamps.size() * sizeof(std::uint64_t));
  const auto mark = [&](int at) {
    if (!apart || !leads) return;
    stamp<<<1, 1, 0, stream_>>>(reinterpret_cast<std::uint64_t*>(memory.get()) + at);
    CUDA_OK(cudaGetLastError());
  };
  const auto in_turn = [this] {
    if (ranks_as_ == RanksAs::threads) meeting_.meet();
  };
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  in_turn();
  if (leads) CUDA_OK(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeRelaxed));
  in_turn();
  for (int step = 0; step < steps; ++step) {
    mark(kMarks * step);
    in_turn();
    first();
    in_turn();
    mark(kMarks * step + 1);
    in_turn();
    second();
    in_turn();
    mark(kMarks * step + 2);
    mark(kMarks * step + 3);
  }
  Times times;
  if (leads) {
    CUDA_OK(cudaStreamEndCapture(stream_, &graph));
    CUDA_OK(cudaGraphInstantiate(&executable, graph, 0));
    const Event begin, end;
    for (int i = 0; i < replays + 2; ++i) {
      if (ranks_as_ != RanksAs::threads) meeting_.meet();
      CUDA_OK(cudaEventRecord(begin.get(), stream_));
      CUDA_OK(cudaGraphLaunch(executable, stream_));
      CUDA_OK(cudaEventRecord(end.get(), stream_));
      CUDA_OK(cudaEventSynchronize(end.get()));
      if (i < 2) continue;
      times.whole.push_back(end.us_since(begin) / static_cast<float>(steps));
      if (!apart) continue;
      CUDA_OK(cudaMemcpy(stamps.data(), memory.get(), stamps.size() * sizeof(std::uint64_t),
                         cudaMemcpyDeviceToHost));
      float sums[kMarks] = {};
      for (std::size_t at = 1; at < stamps.size(); ++at) {
        sums[at % kMarks] += static_cast<float>(stamps[at] - stamps[at - 1]) / 1000.0F;
      }
      times.first.push_back((sums[1] - sums[3]) / static_cast<float>(steps));
      times.second.push_back((sums[2] - sums[3]) / static_cast<float>(steps));
    }
    CUDA_OK(cudaGraphExecDestroy(executable));
    CUDA_OK(cudaGraphDestroy(graph));
  }
  in_turn();
  return times;
}

}  // namespace wherry::bench
