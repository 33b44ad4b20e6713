// This rank's window and the signals through it: strong signals out, bounded waits in, and the
// fault protocol (docs/protocol.md). Knows channels and epochs, nothing of rows.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "fabric/fabric.hpp"
#include "kernels/layout.hpp"
#include "support/doorbell.hpp"
#include "wherry/error.hpp"

namespace wherry {

// The memory of all ranks, mapped once, and the exchange whose turn it is to use its rows.
struct MappedWindow {
  std::unique_ptr<Fabric> fabric;
  const void* user = nullptr;  // null: nobody yet; itself: an exchange that is gone
};

class Window {
 public:
  // `begin`: where this exchange's header lies in the mapped window; `layout` counts from there and
  // must be the same on every rank.
  Window(const Group& group, std::shared_ptr<MappedWindow> mapped, std::uint64_t begin,
         const layout::WindowLayout& layout, Seconds deadline);

  [[nodiscard]] const layout::WindowLayout& layout() const noexcept { return layout_; }
  [[nodiscard]] std::string_view fabric() const noexcept { return mapped_->fabric->name(); }
  [[nodiscard]] MappedWindow& mapped() const noexcept { return *mapped_; }
  [[nodiscard]] std::byte* base(int peer) const noexcept {
    return bases_[static_cast<std::size_t>(peer)];
  }
  [[nodiscard]] std::byte* const* bases() const noexcept { return bases_.data(); }
  [[nodiscard]] std::byte* own() const noexcept { return base(rank_); }

  // One word of a channel: what a step signals and waits for.
  struct Signal {
    layout::Channel channel;
    std::uint64_t generation;
    std::uint32_t epoch;
  };
  // Where a wait stands, for the error it may end in.
  struct Place {
    Stage stage;
    std::uint64_t step;
  };

  // Tells every peer (this rank last) that its `counts` for this signal are visible.
  void signal_all(const Signal& signal, const std::vector<std::uint32_t>& counts);

  // Waits for the signal of every peer; returns their counts. Throws the first cause of a fault:
  // timeout or peer_failed naming the peer, after telling all ranks.
  void wait_all(const Signal& signal, const Place& place, std::vector<std::uint32_t>& counts);

  // Ends this exchange everywhere: writes the cause to every window that has none yet.
  void raise(ErrorCode cause, Stage stage, int blamed, std::uint64_t step);

  // The first cause that reached this rank, if any; all ranks have then been told.
  [[nodiscard]] std::optional<Error> fault() const;

 private:
  std::uint32_t wait_one(int peer, const Signal& signal, const Place& place,
                         Clock::time_point deadline);
  [[noreturn]] void fail_with(std::uint64_t word) const;
  void tell_all(std::uint64_t word) const;
  [[nodiscard]] int root_of(int peer) const;
  [[noreturn]] void give_up(int peer, const Signal& signal, const Place& place, bool peer_died);

  int rank_;
  int size_;
  Seconds allowed_;
  std::uint64_t begin_;
  layout::WindowLayout layout_;
  std::shared_ptr<MappedWindow> mapped_;
  std::vector<std::byte*> bases_;
  std::vector<bool> beside_;  // peers that share this rank's only processor
};

// What rank `rank` throws for a fault word.
[[nodiscard]] Error error_of_fault(std::uint64_t word, int rank);

}  // namespace wherry
