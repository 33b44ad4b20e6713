#include "fabric/cuda_peer/memory.hpp"

#include <cudaTypedefs.h>

#include "kernels/layout.hpp"
#include "support/check.hpp"

namespace wherry::cuda {

namespace {

// A window takes whole pages of the device, so that sharing it shares nothing else.
constexpr std::uint64_t kPage = std::uint64_t{2} << 20;
constexpr Error::Where kWhere{Stage::startup, -1, -1};

}  // namespace

// --- The driver -------------------------------------------------------------------------------------

namespace {

// Functions of the driver, which the runtime finds for us: nothing more to link.
struct Driver {
  PFN_cuMemCreate_v10020 create = nullptr;
  PFN_cuMemRelease_v10020 release = nullptr;
  PFN_cuMemAddressReserve_v10020 reserve = nullptr;
  PFN_cuMemAddressFree_v10020 free = nullptr;
  PFN_cuMemMap_v10020 map = nullptr;
  PFN_cuMemUnmap_v10020 unmap = nullptr;
  PFN_cuMemSetAccess_v10020 set_access = nullptr;
  PFN_cuMemExportToShareableHandle_v10020 share = nullptr;
  PFN_cuMemImportFromShareableHandle_v10020 import = nullptr;
  PFN_cuMemGetAddressRange_v3020 range = nullptr;
  PFN_cuDeviceGetAttribute_v2000 attribute = nullptr;
  PFN_cuGetErrorString_v6000 error_string = nullptr;
  std::string missing;  // empty: all are there
};

template <typename Function>
void find(Driver& driver, const char* symbol, unsigned version, Function& function) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result{};
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion(symbol, &found, version, cudaEnableDefault, &result);
  if (error != cudaSuccess) static_cast<void>(cudaGetLastError());
  if (error != cudaSuccess || result != cudaDriverEntryPointSuccess) {
    driver.missing = fmt::format("the driver has no {}", symbol);
  }
  function = reinterpret_cast<Function>(found);
}

const Driver& driver() {
  static const Driver found = [] {
    Driver d;
    find(d, "cuMemCreate", 10020, d.create);
    find(d, "cuMemRelease", 10020, d.release);
    find(d, "cuMemAddressReserve", 10020, d.reserve);
    find(d, "cuMemAddressFree", 10020, d.free);
    find(d, "cuMemMap", 10020, d.map);
    find(d, "cuMemUnmap", 10020, d.unmap);
    find(d, "cuMemSetAccess", 10020, d.set_access);
    find(d, "cuMemExportToShareableHandle", 10020, d.share);
    find(d, "cuMemImportFromShareableHandle", 10020, d.import);
    find(d, "cuMemGetAddressRange", 3020, d.range);
    find(d, "cuDeviceGetAttribute", 2000, d.attribute);
    find(d, "cuGetErrorString", 6000, d.error_string);
    return d;
  }();
  return found;
}

void check(CUresult result, const char* what) {
  if (result == CUDA_SUCCESS) return;
  const char* text = "unknown error";
  static_cast<void>(driver().error_string(result, &text));
  throw Error(result == CUDA_ERROR_OUT_OF_MEMORY ? ErrorCode::out_of_memory : ErrorCode::system,
              kWhere, fmt::format("{}: {}", what, text));
}

}  // namespace

// --- Of cudaMalloc ----------------------------------------------------------------------------------

AllocatedMemory::AllocatedMemory(int ordinal, std::uint64_t bytes)
    : ordinal_(ordinal),
      memory_(ordinal, layout::round_up(bytes, kPage)) {
  address_ = memory_.get();
}

AllocatedMemory::AllocatedMemory(int ordinal, std::span<std::byte> given) : ordinal_(ordinal) {
  const DeviceGuard guard(ordinal);
  cuda::check(cudaMemset(given.data(), 0, given.size()), kWhere, "cudaMemset");
  cuda::check(cudaStreamSynchronize(nullptr), kWhere, "cudaMemset");
  address_ = given.data();
}

void AllocatedMemory::allow(int ordinal, Error::Where where) {
  if (ordinal == ordinal_) return;
  const DeviceGuard guard(ordinal);
  int reaches = 0;
  cuda::check(cudaDeviceCanAccessPeer(&reaches, ordinal, ordinal_), where,
              "cudaDeviceCanAccessPeer");
  WHERRY_CHECK(reaches != 0, ErrorCode::unsupported, where,
               "GPU {} cannot address the memory of GPU {}", ordinal, ordinal_);
  const cudaError_t enabled = cudaDeviceEnablePeerAccess(ordinal_, 0);
  if (enabled == cudaErrorPeerAccessAlreadyEnabled) {
    static_cast<void>(cudaGetLastError());
  } else {
    cuda::check(enabled, where, "cudaDeviceEnablePeerAccess");
  }
}

AllocatedMemory::Handle AllocatedMemory::handle(Error::Where where) const {
  const DeviceGuard guard(ordinal_);
  WHERRY_CHECK(driver().missing.empty(), ErrorCode::unsupported, where, "{}", driver().missing);
  CUdeviceptr allocation = 0;
  std::size_t bytes = 0;
  const auto address = reinterpret_cast<CUdeviceptr>(address_);
  check(driver().range(&allocation, &bytes, address), "cuMemGetAddressRange");
  Handle handle{{}, address - allocation};
  cuda::check(cudaIpcGetMemHandle(&handle.allocation, address_), where, "cudaIpcGetMemHandle");
  return handle;
}

OpenedMemory::OpenedMemory(const AllocatedMemory::Handle& handle, Error::Where where)
    : offset_(handle.offset) {
  void* opened = nullptr;
  cuda::check(cudaIpcOpenMemHandle(&opened, handle.allocation, cudaIpcMemLazyEnablePeerAccess),
              where, "cudaIpcOpenMemHandle");
  address_ = static_cast<std::byte*>(opened) + offset_;
}
OpenedMemory::~OpenedMemory() { static_cast<void>(cudaIpcCloseMemHandle(address_ - offset_)); }
void OpenedMemory::allow(int /*ordinal*/, Error::Where /*where*/) {}

// --- Virtual ----------------------------------------------------------------------------------------

namespace {

using Sharing = VirtualMemory::Sharing;
static_assert(sizeof(CUmemFabricHandle) == sizeof(VirtualMemory::FabricHandle));

CUmemAllocationHandleType type_of(Sharing how) {
  return how == Sharing::fabric_handle ? CU_MEM_HANDLE_TYPE_FABRIC
                                       : CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
}

CUmemAllocationProp properties_on(int ordinal, Sharing how) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.requestedHandleTypes = type_of(how);
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = ordinal;
  return properties;
}

}  // namespace

std::string VirtualMemory::problem(int ordinal, Sharing how) {
  const Driver& d = driver();
  if (!d.missing.empty()) return d.missing;
  const bool fabric = how == Sharing::fabric_handle;
  for (const auto& [attribute, what] :
       {std::pair{CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, "virtual memory"},
        fabric ? std::pair{CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED,
                           "memory shared through fabric handles"}
               : std::pair{CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
                           "memory shared through file descriptors"}}) {
    int has = 0;
    if (d.attribute(&has, attribute, ordinal) != CUDA_SUCCESS || has == 0) {
      return fmt::format("GPU {} has no {}", ordinal, what);
    }
  }
  if (!fabric) return {};
  // Whether this process may is only known when it tries: it needs an IMEX channel.
  try {
    static_cast<void>(VirtualMemory(ordinal, kPage, how).fabric_handle());
  } catch (const Error& error) {
    return fmt::format("GPU {} gives no fabric handle ({})", ordinal, error.message());
  }
  return {};
}

VirtualMemory::VirtualMemory(int ordinal, std::uint64_t bytes, Sharing how)
    : bytes_(layout::round_up(bytes, kPage)) {
  const DeviceGuard guard(ordinal);
  const CUmemAllocationProp properties = properties_on(ordinal, how);
  CUmemGenericAllocationHandle made = 0;
  check(driver().create(&made, bytes_, &properties, 0), "cuMemCreate");
  handle_ = made;
  map(ordinal);
  cuda::check(cudaMemset(address_, 0, bytes_), kWhere, "cudaMemset");
  cuda::check(cudaStreamSynchronize(nullptr), kWhere, "cudaMemset");
}

VirtualMemory::VirtualMemory(int ordinal, std::uint64_t bytes, const Fd& shared)
    : bytes_(layout::round_up(bytes, kPage)) {
  const auto number = static_cast<std::uintptr_t>(shared.get());
  // NOLINTNEXTLINE(performance-no-int-to-ptr): the driver takes the number of a descriptor so
  import(ordinal, reinterpret_cast<void*>(number), Sharing::file_descriptor);
}

VirtualMemory::VirtualMemory(int ordinal, std::uint64_t bytes, const FabricHandle& shared)
    : bytes_(layout::round_up(bytes, kPage)) {
  FabricHandle theirs = shared;
  import(ordinal, theirs.data(), Sharing::fabric_handle);
}

void VirtualMemory::import(int ordinal, void* shared, Sharing how) {
  const DeviceGuard guard(ordinal);
  CUmemGenericAllocationHandle imported = 0;
  check(driver().import(&imported, shared, type_of(how)), "cuMemImportFromShareableHandle");
  handle_ = imported;
  map(ordinal);
}

VirtualMemory::~VirtualMemory() { unmap(); }

// A constructor that throws has no destructor: what is half made goes here.
void VirtualMemory::map(int ordinal) {
  try {
    CUdeviceptr address = 0;
    check(driver().reserve(&address, bytes_, kPage, 0, 0), "cuMemAddressReserve");
    reserved_ = address;
    check(driver().map(address, bytes_, 0, handle_, 0), "cuMemMap");
    mapped_ = true;
    address_ =
        reinterpret_cast<std::byte*>(address);  // NOLINT(performance-no-int-to-ptr): as above
    allow(ordinal, kWhere);
  } catch (const Error&) {
    unmap();
    throw;
  }
}

void VirtualMemory::unmap() noexcept {
  const Driver& d = driver();
  if (mapped_) static_cast<void>(d.unmap(reserved_, bytes_));
  if (reserved_ != 0) static_cast<void>(d.free(reserved_, bytes_));
  if (handle_ != 0) static_cast<void>(d.release(handle_));
  mapped_ = false;
  reserved_ = handle_ = 0;
}

void VirtualMemory::allow(int ordinal, Error::Where where) {
  CUmemAccessDesc access{};
  access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  access.location.id = ordinal;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  const CUresult result = driver().set_access(reserved_, bytes_, &access, 1);
  WHERRY_CHECK(result == CUDA_SUCCESS, ErrorCode::unsupported, where,
               "GPU {} cannot address the memory of a peer's GPU (cuMemSetAccess: {})", ordinal,
               static_cast<int>(result));
}

Fd VirtualMemory::file_descriptor() const {
  int fd = -1;
  check(driver().share(&fd, handle_, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
        "cuMemExportToShareableHandle");
  return Fd(fd);
}

VirtualMemory::FabricHandle VirtualMemory::fabric_handle() const {
  FabricHandle made{};
  check(driver().share(made.data(), handle_, CU_MEM_HANDLE_TYPE_FABRIC, 0),
        "cuMemExportToShareableHandle");
  return made;
}

}  // namespace wherry::cuda
