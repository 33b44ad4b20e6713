#include "support/cuda.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "support/check.hpp"

namespace wherry::cuda {

namespace {

constexpr Error::Where kNowhere{};

}  // namespace

void check(cudaError_t error, Error::Where where, const char* what) {
  if (error == cudaSuccess) return;
  static_cast<void>(cudaGetLastError());  // what is reported here is not reported again
  const ErrorCode code =
      error == cudaErrorMemoryAllocation ? ErrorCode::out_of_memory : ErrorCode::system;
  throw Error(code, where,
              fmt::format("{}: {} ({})", what, cudaGetErrorString(error), cudaGetErrorName(error)));
}

cudaError_t record_beside(cudaStream_t stream, std::span<const cudaEvent_t> events) {
  const bool none = std::ranges::all_of(events, [](cudaEvent_t event) { return event == nullptr; });
  if (none) return cudaSuccess;
  cudaStreamCaptureStatus status{};
  cudaGraph_t graph = nullptr;
  const cudaGraphNode_t* after = nullptr;
  std::size_t count = 0;
#if CUDART_VERSION >= 13000
  cudaError_t error =
      cudaStreamGetCaptureInfo(stream, &status, nullptr, &graph, &after, nullptr, &count);
#else
  cudaError_t error = cudaStreamGetCaptureInfo_v2(stream, &status, nullptr, &graph, &after, &count);
#endif
  // One after the other, so the graph forks once.
  cudaGraphNode_t node = nullptr;
  for (const cudaEvent_t event : events) {
    if (event == nullptr || error != cudaSuccess) continue;
    if (status == cudaStreamCaptureStatusActive) {
      error = cudaGraphAddEventRecordNode(&node, graph, after, count, event);
      after = &node;
      count = 1;
    } else {
      error = cudaEventRecord(event, stream);
    }
  }
  return error;
}

DeviceGuard::DeviceGuard(int ordinal) {
  check(cudaGetDevice(&before_), kNowhere, "cudaGetDevice");
  if (before_ == ordinal) return;
  check(cudaSetDevice(ordinal), kNowhere, "cudaSetDevice");
  changed_ = true;
}

DeviceGuard::~DeviceGuard() {
  if (changed_) static_cast<void>(cudaSetDevice(before_));
}

DeviceMemory::DeviceMemory(int ordinal, std::size_t bytes) : ordinal_(ordinal), bytes_(bytes) {
  const DeviceGuard guard(ordinal);
  void* data = nullptr;
  check(cudaMalloc(&data, std::max<std::size_t>(bytes, 16)), kNowhere, "cudaMalloc");
  data_ = static_cast<std::byte*>(data);
  check(cudaMemset(data, 0, std::max<std::size_t>(bytes, 16)), kNowhere, "cudaMemset");
  check(cudaStreamSynchronize(nullptr), kNowhere, "cudaMemset");
}

DeviceMemory::~DeviceMemory() {
  if (data_ == nullptr) return;
  try {
    const DeviceGuard guard(ordinal_);
    static_cast<void>(cudaFree(data_));
  } catch (const Error&) {
    static_cast<void>(cudaGetLastError());  // the device is gone, and its memory with it
  }
}

DeviceMemory& DeviceMemory::operator=(DeviceMemory&& other) noexcept {
  std::swap(ordinal_, other.ordinal_);
  std::swap(bytes_, other.bytes_);
  std::swap(data_, other.data_);
  return *this;
}

PinnedMemory::PinnedMemory(std::size_t bytes) {
  void* data = nullptr;
  check(cudaHostAlloc(&data, bytes, cudaHostAllocMapped | cudaHostAllocPortable), kNowhere,
        "cudaHostAlloc");
  std::memset(data, 0, bytes);
  data_ = static_cast<std::byte*>(data);
}

PinnedMemory::~PinnedMemory() { static_cast<void>(cudaFreeHost(data_)); }

SideStream::SideStream(int ordinal) : ordinal_(ordinal) {
  const DeviceGuard guard(ordinal);
  check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), kNowhere, "cudaStreamCreate");
}

SideStream::~SideStream() { static_cast<void>(cudaStreamDestroy(stream_)); }

void SideStream::read(void* to, const void* from, std::size_t bytes) const {
  if (bytes == 0) return;
  const DeviceGuard guard(ordinal_);
  check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream_), kNowhere,
        "copy to the host");
  check(cudaStreamSynchronize(stream_), kNowhere, "copy to the host");
}

void SideStream::write(void* to, const void* from, std::size_t bytes) const {
  if (bytes == 0) return;
  const DeviceGuard guard(ordinal_);
  check(from != nullptr ? cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream_)
                        : cudaMemsetAsync(to, 0, bytes, stream_),
        kNowhere, "copy to the device");
  check(cudaStreamSynchronize(stream_), kNowhere, "copy to the device");
}

}  // namespace wherry::cuda
