// What an Exchange is made of, and the life of its generations. Internal.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "exchange/config.hpp"
#include "exchange/window.hpp"
#include "kernels/stages.hpp"
#include "support/team.hpp"
#include "wherry/exchange.hpp"

namespace wherry {

// One generation of the window: the dispatch that uses it now, or used it last.
//
//   unused -> sending -> received -> combining -> combined      paired use: free at once
//                            \-> released                       unpaired use: credits free it
//   unused -> combining -> combined (alone)                     a combine without its dispatch
//                            \-> lost                           a shared window was handed over
enum class Phase : std::uint8_t { unused, sending, received, combining, combined, released, lost };

struct Generation {
  Phase phase = Phase::unused;
  std::uint64_t step = 0;         // the dispatch (or lone combine) that uses it
  std::uint64_t plan_serial = 0;  // of its plan
  bool alone = false;             // the use is a combine without a dispatch

  // Uses of each channel so far; all ranks issue the same halves in the same order, so all agree.
  std::uint32_t dispatch_epoch = 0;
  std::uint32_t combine_epoch = 0;
  std::uint32_t credit_epoch = 0;

  // What dispatch_recv and combine need when the plan may have moved on.
  std::vector<std::int64_t> slot_counts, slot_begin, payload_rows_from;
  std::int64_t token_rows = 0;
  bool has_scalars = false;
  TensorView out;                              // the caller's memory for the rows, or null
  std::vector<Received::TokenChoice> choices;  // tokens
  std::vector<std::int32_t> gather;

  kernels::CombineRecv pending{};  // between combine_begin and its finish
};

// The entries of the tokens [begin, end).
[[nodiscard]] inline kernels::PlanArrays arrays(const PlanData& plan, std::int64_t begin,
                                                std::int64_t end) noexcept {
  const std::int64_t at = begin * plan.topk;
  return {end - begin,
          plan.topk,
          plan.dest.data() + at,
          plan.row.data() + at,
          plan.token_row.data() + at,
          plan.weight.data() + at,
          plan.repeat.data() + at};
}

// Whether an optional tensor was given: without rows it may have no memory to point at.
template <typename Pointer>
[[nodiscard]] bool is_given(const BasicTensorView<Pointer>& tensor) noexcept {
  return tensor.data != nullptr || tensor.cols != 0;
}

// Where an exchange lies in a window that it shares; by default it maps one of its own.
struct Share {
  std::shared_ptr<MappedWindow> mapped = nullptr;
  std::uint64_t begin = 0;       // of its header
  std::uint64_t rows_begin = 0;  // of its rows, counted from its header
};

struct Exchange::State {
  State(const Group& group, const ExchangeConfig& config, const Share& share);
  ~State();
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  std::uint64_t id;  // tells plans of this exchange from others'
  ExchangeConfig config;
  Placement placement;
  Capacity capacity;
  kernels::Mode mode;
  const kernels::KernelSet* kernels;
  int rank, size;
  Window window;
  Team team;

  std::uint64_t plans = 0;  // plan() calls so far
  std::uint64_t steps = 0;  // dispatches and lone combines so far
  std::vector<Generation> generations;
  std::uint32_t handovers = 0;      // turns this exchange has taken at its window
  std::uint64_t placements = 0;     // set_placement() calls so far
  std::uint64_t placement_hash;     // of `placement`
  std::vector<std::int64_t> loads;  // [experts]
  Traffic traffic;
  std::vector<std::uint32_t> signal_counts;  // scratch, [ranks]

  // Throws the sticky first cause, if any.
  void check() const;
  // Throws, after telling all ranks: they would wait for this one.
  [[noreturn]] void end(ErrorCode code, const Error::Where& where, std::uint64_t step,
                        const std::string& problem);
  // The same for a wrong argument, which only this rank may have.
  [[noreturn]] void refuse(Stage stage, std::uint64_t step, const std::string& problem);

  [[nodiscard]] std::uint64_t generation_of(std::uint64_t step) const noexcept {
    return (step - 1) % generations.size();
  }
  [[nodiscard]] Generation& at_step(std::uint64_t step) noexcept {
    return generations[generation_of(step)];
  }
  [[nodiscard]] kernels::Windows windows(std::uint64_t generation) const noexcept;
  [[nodiscard]] std::int64_t local_slots() const noexcept {
    return placement.num_local_slots(rank);
  }
  // Rows that `rows` and `results` hold for this generation, padding included.
  [[nodiscard]] std::int64_t payload_rows(const Generation& generation) const noexcept;

  // Whether so many rows are too many to stay in a core's cache until they are read.
  [[nodiscard]] bool streams(std::int64_t rows) const noexcept {
    constexpr std::int64_t kStreamingBytes = 4 << 20;
    return rows * static_cast<std::int64_t>(window.layout().row_bytes) >= kStreamingBytes;
  }

  // Makes the generation of the next step free, waiting for credits where design 5.6 asks for them,
  // and takes it. Throws misuse if its last use is still in flight.
  Generation& enter(Stage stage, bool alone);
  void send_credits(Generation& generation);
  // Takes this exchange's turn at a shared window: waits until every rank is done with the rows of
  // the exchange that had it. Throws misuse if that one has a half in flight here.
  void take_window(Stage stage);
  [[nodiscard]] bool in_flight() const noexcept;

  void check_plan(const Plan& plan, Stage stage) const;
  // What a tensor must be.
  struct Shape {
    DType dtype;
    std::int64_t rows, cols;
  };
  [[nodiscard]] Shape plain(std::int64_t rows) const noexcept {
    return {config.dtype, rows, config.hidden};
  }
  // Rows as they travel to the experts.
  [[nodiscard]] Shape on_wire(std::int64_t rows) const noexcept;
  void check_tensor(Stage stage, std::uint64_t step, const char* argument,
                    const ConstTensorView& tensor, const Shape& shape);
  // Runs a counting kernel over [0, count) on the team's threads; returns what all parts moved.
  template <typename Kernel>
  kernels::Moved split(std::int64_t count, Kernel kernel) {
    std::atomic<std::int64_t> rows{0};
    std::atomic<std::int64_t> link_rows{0};
    team.split(count, [&](std::int64_t begin, std::int64_t end) {
      const kernels::Moved moved = kernel(begin, end);
      rows += moved.rows;
      link_rows += moved.link_rows;
    });
    return {rows.load(), link_rows.load()};
  }

  // Runs fn(begin, end) on the team's threads over the rows that hold something: all token rows, or
  // those of each slot without its padding or spare room.
  template <typename Fn>
  void split_filled(const Generation& g, Fn fn) {
    if (mode.sends_token_rows()) {
      team.split(g.token_rows, fn);
      return;
    }
    for (std::size_t slot = 0; slot < g.slot_counts.size(); ++slot) {
      team.split(g.slot_counts[slot], [&](std::int64_t begin, std::int64_t end) {
        fn(g.slot_begin[slot] + begin, g.slot_begin[slot] + end);
      });
    }
  }

  // Holds what has arrived (signal_counts) against the plan, and learns whether scalars came along.
  void check_arrivals(Generation& g);
  // Throws unless every rank that has rows of this rank's tokens has sent their scalars home.
  void check_scalars_home(const Generation& g);
  void check_out(const TensorView& out, const PlanData& plan);
  [[nodiscard]] Generation* oldest_uncombined(std::uint64_t plan_serial) noexcept;
  [[nodiscard]] Received received_view(const Generation& generation) const;
  // Makes g.out of the caller hold the received rows, converted back.
  void fill_out(const Generation& g, const Received& received);
  // Brings y to where its home ranks, or combine_send, read it; converts it if it goes home so.
  void place_results(const Generation& generation, const ConstTensorView& y);

  [[nodiscard]] static Error::Where where(Stage stage, int rank) noexcept {
    return {stage, rank, -1};
  }
};

}  // namespace wherry
