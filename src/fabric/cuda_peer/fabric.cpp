#include "fabric/cuda_peer/fabric.hpp"

#include <unistd.h>

#include <chrono>
#include <cstring>
#include <span>
#include <thread>

#include "fabric/addressable.hpp"
#include "group/state.hpp"
#include "support/check.hpp"
#include "support/host.hpp"

namespace wherry {

namespace {

// A GPU window takes whole pages of the device, so that IPC shares nothing else.
constexpr std::uint64_t kPage = std::uint64_t{2} << 20;

Error::Where at_startup(const Group& group, int peer = -1) {
  return {Stage::startup, group.rank(), peer};
}

std::string text_of(const Group::Bytes& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// Every rank's text. All give up together if one is not empty.
void agree_on_problem(const Group& group, ErrorCode code, const std::string& problem) {
  const auto all = group.allgather(std::as_bytes(std::span(problem)));
  for (std::size_t peer = 0; peer < all.size(); ++peer) {
    if (all[peer].empty()) continue;
    throw Error(code, at_startup(group, static_cast<int>(peer)), text_of(all[peer]));
  }
}

std::uint64_t closed_word(int peer) {
  return static_cast<std::uint64_t>(peer) * layout::kSignalStride;
}

// What a rank tells the others of its window.
struct WindowAddress {
  const std::shared_ptr<cuda::DeviceMemory>* memory = nullptr;  // for ranks of its process
  cudaIpcMemHandle_t handle{};
};

}  // namespace

std::vector<CudaPlace> find_places(const Group& group, Device device) {
  std::string mine;
  std::string problem;
  int count = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&count); error != cudaSuccess) {
    problem = fmt::format("no CUDA device can be used: {}", cudaGetErrorString(error));
    static_cast<void>(cudaGetLastError());
  } else if (device.ordinal < 0 || device.ordinal >= count) {
    problem = fmt::format("device is cuda:{}; this process sees {}", device.ordinal, count);
  } else {
    cudaDeviceProp properties{};
    cuda::check(cudaGetDeviceProperties(&properties, device.ordinal), at_startup(group),
                "cudaGetDeviceProperties");
    mine = fmt::format("{}/{}/{}/", host_identity(), getpid(), device.ordinal);
    mine.append(properties.uuid.bytes, sizeof(properties.uuid.bytes));
  }
  agree_on_problem(group, ErrorCode::unsupported, problem);
  std::vector<CudaPlace> places;
  for (const Group::Bytes& bytes : group.allgather(std::as_bytes(std::span(mine)))) {
    const std::string text = text_of(bytes);
    const std::size_t host = text.find('/');
    const std::size_t process = text.find('/', host + 1);
    const std::size_t ordinal = text.find('/', process + 1);
    places.push_back({text.substr(0, host), std::stoll(text.substr(host + 1, process - host - 1)),
                      text.substr(ordinal + 1),
                      std::stoi(text.substr(process + 1, ordinal - process - 1))});
    WHERRY_CHECK(places.back().host == places.front().host, ErrorCode::unsupported,
                 at_startup(group, static_cast<int>(places.size()) - 1),
                 "rank {} is on another host than rank 0; GPUs of one host only can be reached",
                 places.size() - 1);
  }
  return places;
}

CudaPeerFabric::CudaPeerFabric(const Group& group, const std::vector<CudaPlace>& places,
                               const WindowRequest& request)
    : rank_(group.rank()),
      deadline_(request.deadline),
      host_(group.state().connect(
          group,
          {layout::round_up(places.size() * layout::kSignalStride, 4096), true, request.deadline})),
      beside_(places.size()),
      opened_(places.size(), false),
      windows_(places.size(), nullptr) {
  const CudaPlace& here = places[static_cast<std::size_t>(rank_)];
  const cuda::DeviceGuard guard(here.ordinal);
  std::string problem;
  WindowAddress mine;
  try {
    own_ =
        std::make_shared<cuda::DeviceMemory>(here.ordinal, layout::round_up(request.bytes, kPage));
    mine.memory = &own_;
  } catch (const Error& error) {
    problem = fmt::format("no memory for a window of {} bytes: {}", request.bytes, error.message());
  }
  agree_on_problem(group, ErrorCode::out_of_memory, problem);
  bool alone = true;
  for (const CudaPlace& place : places) alone = alone && place.process == here.process;
  if (!alone) {
    cuda::check(cudaIpcGetMemHandle(&mine.handle, own_->get()), at_startup(group),
                "cudaIpcGetMemHandle");
  }
  const auto all = group.allgather(std::as_bytes(std::span(&mine, 1)));
  try {
    for (std::size_t peer = 0; peer < places.size(); ++peer) {
      WindowAddress theirs;
      std::memcpy(&theirs, all[peer].data(), sizeof(theirs));
      const Error::Where where = at_startup(group, static_cast<int>(peer));
      if (places[peer].process == here.process) {
        beside_[peer] = *theirs.memory;
        windows_[peer] = beside_[peer]->get();
        if (places[peer].ordinal == here.ordinal) continue;
        int reaches = 0;
        cuda::check(cudaDeviceCanAccessPeer(&reaches, here.ordinal, places[peer].ordinal), where,
                    "cudaDeviceCanAccessPeer");
        WHERRY_CHECK(reaches != 0, ErrorCode::unsupported, where,
                     "GPU {} cannot address the memory of GPU {}", here.ordinal,
                     places[peer].ordinal);
        const cudaError_t enabled = cudaDeviceEnablePeerAccess(places[peer].ordinal, 0);
        if (enabled == cudaErrorPeerAccessAlreadyEnabled) {
          static_cast<void>(cudaGetLastError());
        } else {
          cuda::check(enabled, where, "cudaDeviceEnablePeerAccess");
        }
      } else {
        void* opened = nullptr;
        cuda::check(cudaIpcOpenMemHandle(&opened, theirs.handle, cudaIpcMemLazyEnablePeerAccess),
                    where, "cudaIpcOpenMemHandle");
        windows_[peer] = static_cast<std::byte*>(opened);
        opened_[peer] = true;
      }
    }
  } catch (const Error& error) {
    problem = error.message();
  }
  // Also says that all have copied the addresses.
  try {
    agree_on_problem(group, ErrorCode::unsupported, problem);
  } catch (const Error&) {
    close();
    throw;
  }
}

CudaPeerFabric::~CudaPeerFabric() { close(); }

void CudaPeerFabric::close() noexcept {
  const auto deadline = std::chrono::steady_clock::now() +
                        std::chrono::duration_cast<std::chrono::steady_clock::duration>(deadline_);
  for (std::size_t peer = 0; peer < opened_.size(); ++peer) {
    if (!opened_[peer]) continue;
    static_cast<void>(cudaIpcCloseMemHandle(windows_[peer]));
    host_->signal(static_cast<int>(peer), closed_word(rank_), 1);
  }
  for (std::size_t peer = 0; peer < opened_.size(); ++peer) {
    if (!opened_[peer]) continue;
    const auto closed = window_word(host_->window(rank_), closed_word(static_cast<int>(peer)));
    while (closed.load(std::memory_order_acquire) == 0 && host_->alive(static_cast<int>(peer)) &&
           std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  }
}

}  // namespace wherry
