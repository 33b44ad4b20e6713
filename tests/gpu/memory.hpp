// Device memory of the GPU tests.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

namespace wherry::test {

inline void require(cudaError_t error, const char* what) {
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
  }
}
#define GPU_OK(call) ::wherry::test::require((call), #call)

// `bytes` of device memory, filled with 0xFF: NaN in every type of row.
class Buffer {
 public:
  explicit Buffer(std::size_t bytes) : bytes_(bytes == 0 ? 16 : bytes) {
    GPU_OK(cudaMalloc(&data_, bytes_));
    poison();
  }
  ~Buffer() { static_cast<void>(cudaFree(data_)); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  [[nodiscard]] void* get() const { return data_; }
  template <typename T>
  [[nodiscard]] T* as() const {
    return static_cast<T*>(data_);
  }
  void upload(const void* from, std::size_t bytes) {
    GPU_OK(cudaMemcpy(data_, from, bytes, cudaMemcpyHostToDevice));
    wait();
  }
  void poison() {
    GPU_OK(cudaMemset(data_, 0xFF, bytes_));
    wait();
  }

 private:
  // Both may return before the memory holds it, and other streams do not wait for them.
  static void wait() { GPU_OK(cudaStreamSynchronize(nullptr)); }

  void* data_ = nullptr;
  std::size_t bytes_;
};

template <typename T>
std::vector<T> download(const T* from, std::size_t count) {
  std::vector<T> host(count);
  if (count > 0) GPU_OK(cudaMemcpy(host.data(), from, count * sizeof(T), cudaMemcpyDeviceToHost));
  return host;
}

// This rank's GPU: where there are several, ranks take them in turns.
inline int choose_gpu(int rank) {
  int count = 0;
  GPU_OK(cudaGetDeviceCount(&count));
  GPU_OK(cudaSetDevice(rank % count));
  return rank % count;
}

class Stream {
 public:
  Stream() { GPU_OK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  ~Stream() { static_cast<void>(cudaStreamDestroy(stream_)); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  [[nodiscard]] cudaStream_t get() const { return stream_; }
  void wait() const { GPU_OK(cudaStreamSynchronize(stream_)); }

 private:
  cudaStream_t stream_ = nullptr;
};

}  // namespace wherry::test
