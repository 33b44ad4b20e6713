// Ranks as threads of one process: a window is memory, a peer's window its pointer.
#include <cstring>
#include <memory>
#include <vector>

#include "fabric/addressable.hpp"
#include "fabric/fabric.hpp"
#include "support/check.hpp"

namespace wherry {

namespace {

// One rank's window. Every rank holds all of them: memory stays until all have let go.
struct Memory {
  Memory(std::uint64_t size, bool populate) : bytes(size), window(map_window(-1, size, populate)) {}
  ~Memory() { unmap_window(window, bytes); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  std::uint64_t bytes;
  std::byte* window;
  std::atomic<bool> left{false};  // its rank has destroyed its fabric
};
using SharedMemory = std::shared_ptr<Memory>;

class ProcessFabric final : public Fabric {
 public:
  ProcessFabric(int rank, std::vector<SharedMemory> windows)
      : rank_(rank),
        windows_(std::move(windows)) {}
  ~ProcessFabric() override {
    windows_[static_cast<std::size_t>(rank_)]->left.store(true, std::memory_order_release);
  }

  [[nodiscard]] std::string_view name() const noexcept override { return "process"; }
  [[nodiscard]] std::byte* window(int peer) const noexcept override {
    return windows_[static_cast<std::size_t>(peer)]->window;
  }
  void signal(int peer, std::uint64_t offset, std::uint64_t value) override {
    signal_addressable(window(peer), offset, value);
  }
  [[nodiscard]] bool alive(int peer) override {
    return !windows_[static_cast<std::size_t>(peer)]->left.load(std::memory_order_acquire);
  }

 private:
  int rank_;
  std::vector<SharedMemory> windows_;
};

}  // namespace

std::unique_ptr<Fabric> connect_process(const Group& group, const WindowRequest& request) {
  // Pass a pointer to this rank's shared_ptr; peers copy it between the two collectives. A rank
  // that finds no memory says so with a null pointer, so that all give up together.
  SharedMemory mine;
  std::string problem;
  try {
    mine = std::make_shared<Memory>(request.bytes, request.populate);
  } catch (const Error& error) {
    problem = error.message();
  }
  struct Address {
    const SharedMemory* memory;
  };
  const Address address{mine != nullptr ? &mine : nullptr};
  const auto all = group.allgather(std::as_bytes(std::span(&address, 1)));
  std::vector<SharedMemory> windows;
  int without = -1;
  for (const Group::Bytes& bytes : all) {
    Address theirs{};
    std::memcpy(&theirs, bytes.data(), sizeof(theirs));
    if (theirs.memory == nullptr && without < 0) without = static_cast<int>(windows.size());
    windows.push_back(theirs.memory != nullptr ? *theirs.memory : nullptr);
  }
  group.barrier();
  WHERRY_CHECK(without < 0, ErrorCode::out_of_memory,
               (Error::Where{Stage::startup, group.rank(), without}), "{}",
               problem.empty() ? fmt::format("rank {} has no memory for its window of {} bytes",
                                             without, request.bytes)
                               : problem);
  return std::make_unique<ProcessFabric>(group.rank(), std::move(windows));
}

}  // namespace wherry
