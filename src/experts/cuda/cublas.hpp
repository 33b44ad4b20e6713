// cuBLAS, loaded when experts on a GPU are first made: an exchange does without its 600 MB. Builds with
// WHERRY_GPU_EXPERTS only.
#pragma once

#include <cublas_v2.h>

#include <string>

#include "support/cuda.hpp"

namespace wherry::cuda {

// The functions that are used, of one loaded library.
struct CublasFunctions {
  decltype(&cublasCreate) create = nullptr;
  decltype(&cublasDestroy) destroy = nullptr;
  decltype(&cublasSetStream) set_stream = nullptr;
  decltype(&cublasSetWorkspace) set_workspace = nullptr;
  decltype(&cublasGetVersion) get_version = nullptr;
  decltype(&cublasGetStatusString) status_string = nullptr;
  decltype(&cublasGemmGroupedBatchedEx) grouped = nullptr;
  // The C function: cublas_v2.h has C++ overloads of this name.
  cublasStatus_t (*strided)(cublasHandle_t, cublasOperation_t, cublasOperation_t, int, int, int,
                            const void*, const void*, cudaDataType, int, long long, const void*,
                            cudaDataType, int, long long, const void*, void*, cudaDataType, int,
                            long long, int, cublasComputeType_t, cublasGemmAlgo_t) = nullptr;
};

// A handle with its stream and workspace, on one device.
class Cublas {
 public:
  // Throws unsupported: not found, or older than 12.5, which has no grouped multiplication.
  explicit Cublas(int ordinal);
  ~Cublas();
  Cublas(const Cublas&) = delete;
  Cublas& operator=(const Cublas&) = delete;

  void set_stream(cudaStream_t stream);
  [[nodiscard]] std::string version() const;
  [[nodiscard]] const CublasFunctions& functions() const noexcept { return *functions_; }
  [[nodiscard]] cublasHandle_t handle() const noexcept { return handle_; }
  void check(cublasStatus_t status, const char* what) const;

 private:
  int ordinal_;
  const CublasFunctions* functions_;
  DeviceMemory workspace_;  // of the handle, so that captured graphs keep it
  cublasHandle_t handle_ = nullptr;
};

}  // namespace wherry::cuda
