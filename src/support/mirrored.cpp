#include "support/mirrored.hpp"

#include "support/build_info.hpp"
#include "support/check.hpp"

#if WHERRY_HAS_CUDA
#include "support/cuda.hpp"
#endif

namespace wherry {

#if WHERRY_HAS_CUDA

struct MirroredMemory::Twin {
  cuda::DeviceMemory memory;
};

namespace {

void copy(Device device, void* to, const void* from, std::size_t bytes, cudaMemcpyKind way) {
  const cuda::DeviceGuard guard(device.ordinal);
  cuda::check(cudaMemcpy(to, from, bytes, way), {}, "cudaMemcpy");
}

}  // namespace

void MirroredMemory::resize(std::size_t bytes) {
  host_ = std::make_unique<std::byte[]>(bytes);
  if (device_.kind == Device::Kind::cuda) {
    twin_.reset();
    twin_ = std::make_unique<Twin>(Twin{cuda::DeviceMemory(device_.ordinal, bytes)});
  }
  bytes_ = bytes;
}
std::byte* MirroredMemory::device() const noexcept {
  return twin_ ? twin_->memory.get() : host_.get();
}
void MirroredMemory::upload() {
  if (twin_) copy(device_, twin_->memory.get(), host_.get(), bytes_, cudaMemcpyHostToDevice);
}
void MirroredMemory::download() {
  if (twin_) copy(device_, host_.get(), twin_->memory.get(), bytes_, cudaMemcpyDeviceToHost);
}

void synchronize(Device device) {
  if (device.kind == Device::Kind::cpu) return;
  const cuda::DeviceGuard guard(device.ordinal);
  cuda::check(cudaStreamSynchronize(nullptr), {}, "cudaStreamSynchronize");
}

#else

struct MirroredMemory::Twin {};

void MirroredMemory::resize(std::size_t bytes) {
  WHERRY_CHECK(device_.kind == Device::Kind::cpu, ErrorCode::unsupported, (Error::Where{}),
               "this build has no CUDA: {}", build_info::reason_of("WHERRY_CUDA"));
  host_ = std::make_unique<std::byte[]>(bytes);
  bytes_ = bytes;
}
std::byte* MirroredMemory::device() const noexcept { return host_.get(); }
void MirroredMemory::upload() {}
void MirroredMemory::download() {}

void synchronize(Device /*device*/) {}

#endif

MirroredMemory::MirroredMemory(Device device, std::size_t bytes) : device_(device) {
  resize(bytes);
}
MirroredMemory::MirroredMemory(MirroredMemory&&) noexcept = default;
MirroredMemory& MirroredMemory::operator=(MirroredMemory&&) noexcept = default;
MirroredMemory::~MirroredMemory() = default;

}  // namespace wherry
