#include "experts/cuda/cublas.hpp"

#include <dlfcn.h>

#include <array>

#include "support/check.hpp"

namespace wherry::cuda {

namespace {

constexpr Error::Where kWhere{Stage::experts, -1, -1};
constexpr std::size_t kWorkspaceBytes = std::size_t{32} << 20;  // what cuBLAS takes on Hopper
constexpr int kLeastVersion = 120500;

template <typename Function>
void find(void* library, const char* symbol, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, symbol));
  WHERRY_CHECK(function != nullptr, ErrorCode::unsupported, kWhere, "cuBLAS has no {}", symbol);
}

// By the name that a process with PyTorch has loaded already, then where the build saw it.
void* open_library() {
  const std::array names = {
      fmt::format("libcublas.so.{}", CUBLAS_VER_MAJOR),
      fmt::format("{}/libcublas.so.{}", WHERRY_CUBLAS_FOLDER, CUBLAS_VER_MAJOR)};
  std::string problems;
  for (const std::string& name : names) {
    if (void* library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL); library != nullptr) {
      return library;
    }
    problems += fmt::format("{}{}", problems.empty() ? "" : "; ", dlerror());
  }
  throw Error(ErrorCode::unsupported, kWhere,
              fmt::format("experts on a GPU need cuBLAS, which cannot be loaded: {}", problems));
}

const CublasFunctions& load() {
  static const CublasFunctions functions = [] {
    void* const library = open_library();
    CublasFunctions f;
    find(library, "cublasCreate_v2", f.create);
    find(library, "cublasDestroy_v2", f.destroy);
    find(library, "cublasSetStream_v2", f.set_stream);
    find(library, "cublasSetWorkspace_v2", f.set_workspace);
    find(library, "cublasGetVersion_v2", f.get_version);
    find(library, "cublasGetStatusString", f.status_string);
    find(library, "cublasGemmGroupedBatchedEx", f.grouped);
    find(library, "cublasGemmStridedBatchedEx", f.strided);
    return f;
  }();
  return functions;
}

}  // namespace

Cublas::Cublas(int ordinal)
    : ordinal_(ordinal),
      functions_(&load()),
      workspace_(ordinal, kWorkspaceBytes) {
  const DeviceGuard guard(ordinal);
  check(functions_->create(&handle_), "cublasCreate");
  int number = 0;
  check(functions_->get_version(handle_, &number), "cublasGetVersion");
  WHERRY_CHECK(number >= kLeastVersion, ErrorCode::unsupported, kWhere,
               "cuBLAS {} has no grouped multiplication; 12.5 or later has", version());
  set_stream(nullptr);
}

Cublas::~Cublas() {
  try {
    const DeviceGuard guard(ordinal_);
    static_cast<void>(functions_->destroy(handle_));
  } catch (const Error&) {
    return;  // the device is gone
  }
}

void Cublas::set_stream(cudaStream_t stream) {
  check(functions_->set_stream(handle_, stream), "cublasSetStream");
  // A change of stream takes the workspace away.
  check(functions_->set_workspace(handle_, workspace_.get(), workspace_.bytes()),
        "cublasSetWorkspace");
}

std::string Cublas::version() const {
  int number = 0;
  check(functions_->get_version(handle_, &number), "cublasGetVersion");
  return fmt::format("{}.{}.{}", number / 10000, number / 100 % 100, number % 100);
}

void Cublas::check(cublasStatus_t status, const char* what) const {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  throw Error(status == CUBLAS_STATUS_ALLOC_FAILED ? ErrorCode::out_of_memory : ErrorCode::system,
              kWhere, fmt::format("{}: {}", what, functions_->status_string(status)));
}

}  // namespace wherry::cuda
