#include "fabric/cuda_peer/fabric.hpp"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <span>
#include <thread>
#include <tuple>

#include "fabric/addressable.hpp"
#include "fabric/shm/sockets.hpp"
#include "group/state.hpp"
#include "support/check.hpp"
#include "support/host.hpp"

namespace wherry {

namespace {

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

// What is wrong with the caller's memory for a window; empty: nothing.
std::string problem_of(const WindowRequest& request, int ordinal) {
  constexpr std::uintptr_t kAlignment = 256;
  const std::span<std::byte> memory = request.memory;
  if (memory.empty()) return {};
  if (memory.size() < request.bytes) {
    return fmt::format("the memory for the window has {} bytes; the window takes {}", memory.size(),
                       request.bytes);
  }
  if (reinterpret_cast<std::uintptr_t>(memory.data()) % kAlignment != 0) {
    return fmt::format("the memory for the window is not aligned to {} bytes", kAlignment);
  }
  cudaPointerAttributes attributes{};
  cuda::check(cudaPointerGetAttributes(&attributes, memory.data()), {Stage::startup, -1, -1},
              "cudaPointerGetAttributes");
  if (attributes.type != cudaMemoryTypeDevice || attributes.device != ordinal) {
    return fmt::format("the memory for the window is not memory of cuda:{}", ordinal);
  }
  return {};
}

std::uint64_t closed_word(int peer) {
  return static_cast<std::uint64_t>(peer) * layout::kSignalStride;
}

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
      kind_(choose(group, places, request)),
      windows_(places.size()) {
  try {
    make(group, places, request);
  } catch (const Error&) {
    close();
    throw;
  }
}

CudaPeerFabric::~CudaPeerFabric() { close(); }

std::string_view CudaPeerFabric::name() const noexcept {
  switch (kind_) {
    case Windows::pointers: return "cuda_peer, pointers";
    case Windows::virtual_memory: return "cuda_peer, virtual memory";
    case Windows::fabric_handles: return "cuda_peer, fabric handles";
    case Windows::ipc: return "cuda_peer, CUDA IPC";
  }
  return "cuda_peer";
}

CudaPeerFabric::Windows CudaPeerFabric::choose(const Group& group,
                                               const std::vector<CudaPlace>& places,
                                               const WindowRequest& request) const {
  const CudaPlace& here = places[static_cast<std::size_t>(rank_)];
  const char* const variable = std::getenv("WHERRY_CUDA_WINDOWS");
  const std::string asked = variable != nullptr ? variable : "";
  const bool known =
      asked.empty() || asked == "virtual_memory" || asked == "fabric_handles" || asked == "ipc";
  agree_on_problem(
      group, ErrorCode::bad_argument,
      known ? std::string()
            : fmt::format("WHERRY_CUDA_WINDOWS is '{}'; it may be virtual_memory, fabric_handles "
                          "or ipc",
                          asked));
  agree_on_problem(group, ErrorCode::bad_argument, problem_of(request, here.ordinal));
  const bool given = !request.memory.empty();
  for (const auto& flag : group.allgather(std::as_bytes(std::span(&given, 1)))) {
    WHERRY_CHECK(std::to_integer<int>(flag.front()) == static_cast<int>(given),
                 ErrorCode::config_mismatch, at_startup(group),
                 "some ranks give memory for their window and others do not");
  }
  const bool alone = std::ranges::all_of(
      places, [&](const CudaPlace& place) { return place.process == here.process; });
  using Sharing = cuda::VirtualMemory::Sharing;
  for (const auto& [kind, name, how] :
       {std::tuple{Windows::virtual_memory, "virtual_memory", Sharing::file_descriptor},
        std::tuple{Windows::fabric_handles, "fabric_handles", Sharing::fabric_handle}}) {
    std::string problem = "not asked for";
    if (!given && (asked.empty() || asked == name)) {
      problem = cuda::VirtualMemory::problem(here.ordinal, how);
    }
    agree_on_problem(group, ErrorCode::unsupported, asked == name && !given ? problem : "");
    bool all_can = true;
    for (const Group::Bytes& theirs : group.allgather(std::as_bytes(std::span(problem)))) {
      all_can = all_can && theirs.empty();
    }
    if (all_can) return alone ? Windows::pointers : kind;
  }
  return alone ? Windows::pointers : Windows::ipc;
}

void CudaPeerFabric::make(const Group& group, const std::vector<CudaPlace>& places,
                          const WindowRequest& request) {
  const CudaPlace& here = places[static_cast<std::size_t>(rank_)];
  const auto mine = static_cast<std::size_t>(rank_);
  const cuda::DeviceGuard guard(here.ordinal);
  const auto until = Clock::now() + std::chrono::duration_cast<Clock::duration>(request.deadline);
  std::vector<Fd> sockets;
  if (kind_ == Windows::virtual_memory) sockets = shm::connect_all(group, request.deadline);

  // What a rank tells the others of its window.
  struct Address {
    const std::shared_ptr<cuda::WindowMemory>* memory;  // for ranks of its process
    cuda::AllocatedMemory::Handle handle;
    cuda::VirtualMemory::FabricHandle fabric_handle;
  };
  Address address{&windows_[mine], {}, {}};
  std::string problem;
  try {
    using Sharing = cuda::VirtualMemory::Sharing;
    if (kind_ == Windows::virtual_memory) {
      windows_[mine] = std::make_shared<cuda::VirtualMemory>(here.ordinal, request.bytes,
                                                             Sharing::file_descriptor);
    } else if (kind_ == Windows::fabric_handles) {
      const auto memory = std::make_shared<cuda::VirtualMemory>(here.ordinal, request.bytes,
                                                                Sharing::fabric_handle);
      windows_[mine] = memory;
      address.fabric_handle = memory->fabric_handle();
    } else {
      const auto memory =
          request.memory.empty()
              ? std::make_shared<cuda::AllocatedMemory>(here.ordinal, request.bytes)
              : std::make_shared<cuda::AllocatedMemory>(here.ordinal, request.memory);
      windows_[mine] = memory;
      if (kind_ == Windows::ipc) address.handle = memory->handle(at_startup(group));
    }
  } catch (const Error& error) {
    problem = fmt::format("no memory for a window of {} bytes: {}", request.bytes, error.message());
  }
  agree_on_problem(group, ErrorCode::out_of_memory, problem);

  const auto all = group.allgather(std::as_bytes(std::span(&address, 1)));
  try {
    Fd shared;
    if (kind_ == Windows::virtual_memory) {
      shared = static_cast<const cuda::VirtualMemory&>(*windows_[mine]).file_descriptor();
    }
    for (std::size_t peer = 0; peer < places.size(); ++peer) {
      if (!shared.valid() || places[peer].process == here.process) continue;
      shm::send_fd(sockets[peer], shared.get(), rank_, static_cast<int>(peer));
    }
    for (std::size_t peer = 0; peer < places.size(); ++peer) {
      if (peer == mine) continue;
      const int number = static_cast<int>(peer);
      const Error::Where where = at_startup(group, number);
      Address theirs{};
      std::memcpy(&theirs, all[peer].data(), sizeof(theirs));
      if (places[peer].process == here.process) {
        windows_[peer] = *theirs.memory;
        windows_[peer]->allow(here.ordinal, where);
      } else if (kind_ == Windows::virtual_memory) {
        const Fd fd = shm::receive_fd(sockets[peer], rank_, number, until);
        windows_[peer] = std::make_shared<cuda::VirtualMemory>(here.ordinal, request.bytes, fd);
      } else if (kind_ == Windows::fabric_handles) {
        windows_[peer] = std::make_shared<cuda::VirtualMemory>(here.ordinal, request.bytes,
                                                               theirs.fabric_handle);
      } else {
        windows_[peer] = std::make_shared<cuda::OpenedMemory>(theirs.handle, where);
      }
    }
  } catch (const Error& error) {
    problem = error.message();
  }
  // Also says that all have copied the addresses.
  agree_on_problem(group, ErrorCode::unsupported, problem);
}

void CudaPeerFabric::close() noexcept {
  const auto deadline = std::chrono::steady_clock::now() +
                        std::chrono::duration_cast<std::chrono::steady_clock::duration>(deadline_);
  std::vector<int> opened;
  for (std::size_t peer = 0; peer < windows_.size(); ++peer) {
    if (dynamic_cast<cuda::OpenedMemory*>(windows_[peer].get()) == nullptr) continue;
    opened.push_back(static_cast<int>(peer));
    windows_[peer].reset();
    host_->signal(opened.back(), closed_word(rank_), 1);
  }
  for (const int peer : opened) {
    const auto closed = window_word(host_->window(rank_), closed_word(peer));
    while (closed.load(std::memory_order_acquire) == 0 && host_->alive(peer) &&
           std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  }
}

}  // namespace wherry
