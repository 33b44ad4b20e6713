#include "fabric/faulty/fabric.hpp"

#include <array>
#include <utility>

#include "group/state.hpp"

namespace wherry {

namespace {

class FaultyFabric final : public Fabric {
 public:
  FaultyFabric(std::unique_ptr<Fabric> real, int rank, const layout::WindowLayout& layout,
               FaultScript script)
      : real_(std::move(real)),
        rank_(rank),
        layout_(layout),
        script_(std::move(script)) {}

  [[nodiscard]] std::string_view name() const noexcept override { return real_->name(); }
  [[nodiscard]] std::byte* window(int peer) const noexcept override { return real_->window(peer); }
  [[nodiscard]] bool alive(int peer) override { return real_->alive(peer); }

  void signal(int peer, std::uint64_t offset, std::uint64_t value) override {
    SignalEvent event = event_of(offset);
    event.rank = rank_;
    event.peer = peer;
    event.epoch = layout::signal_epoch(value);
    event.ordinal = sent_[static_cast<std::size_t>(event.channel)]++;
    if (script_.before(event)) {
      script_.deliver(event,
                      [real = real_, peer, offset, value] { real->signal(peer, offset, value); });
    }
    script_.after(event);
  }

 private:
  [[nodiscard]] SignalEvent event_of(std::uint64_t offset) const {
    SignalEvent event;
    for (std::uint32_t c = 0; c < layout::kNumChannels; ++c) {
      const auto channel = static_cast<layout::Channel>(c);
      for (std::uint64_t g = 0; g < layout_.generations(channel); ++g) {
        if (layout_.signal(channel, g, static_cast<std::uint64_t>(rank_)) != offset) continue;
        event.channel = channel;
        event.generation = g;
      }
    }
    return event;
  }

  std::shared_ptr<Fabric> real_;  // a signal that is delivered late keeps it
  int rank_;
  layout::WindowLayout layout_;
  FaultScript script_;
  std::array<std::uint64_t, layout::kNumChannels> sent_{};
};

}  // namespace

void make_faulty(Group& group, const layout::WindowLayout& layout, FaultScript script) {
  detail::GroupState& state = group.state();
  state.connect = [real = state.connect, rank = state.rank, layout, script = std::move(script)](
                      const Group& of, const WindowRequest& request) -> std::unique_ptr<Fabric> {
    return std::make_unique<FaultyFabric>(real(of, request), rank, layout, script);
  };
}

}  // namespace wherry
