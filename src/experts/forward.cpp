// The public face of GatedMlp: what is checked, and how each layout walks its rows.
#include <algorithm>
#include <utility>

#include "experts/gated_mlp.hpp"
#include "experts/sum_choices.hpp"
#include "support/check.hpp"

namespace wherry {
namespace {

using experts::kBlockRows;

void check_rows(const ExpertsConfig& config, ConstTensorView view, const char* what) {
  WHERRY_CHECK_ARGUMENT(view.dtype == config.dtype && view.cols == config.hidden, Stage::experts,
                        "{} is [{}, {}] {}; these experts take [n, {}] {}", what, view.rows,
                        view.cols, name(view.dtype), config.hidden, name(config.dtype));
  WHERRY_CHECK_ARGUMENT(view.data != nullptr || view.rows == 0, Stage::experts,
                        "{} has {} rows and no data", what, view.rows);
}

// Segments of slots: each within [0, rows).
void check_segments(std::int64_t num_slots, std::span<const std::int64_t> begin,
                    std::span<const std::int64_t> counts, std::int64_t rows) {
  const auto slots = static_cast<std::size_t>(num_slots);
  WHERRY_CHECK_ARGUMENT(counts.size() == slots && begin.size() >= slots, Stage::experts,
                        "{} slot_counts and {} slot_begin; there are {} slots", counts.size(),
                        begin.size(), num_slots);
  for (std::size_t slot = 0; slot < slots; ++slot) {
    const bool inside = counts[slot] == 0 || (begin[slot] >= 0 && counts[slot] > 0 &&
                                              begin[slot] <= rows - counts[slot]);
    WHERRY_CHECK_ARGUMENT(inside, Stage::experts,
                          "slot {} has {} rows from row {} on, but there are {} rows", slot,
                          counts[slot], begin[slot], rows);
  }
}

// fn(slot, first row, number of rows) for blocks of at most kBlockRows rows.
template <typename Fn>
void for_blocks(std::span<const std::int64_t> begin, std::span<const std::int64_t> counts,
                const Fn& fn) {
  for (std::size_t slot = 0; slot < counts.size(); ++slot) {
    for (std::int64_t done = 0; done < counts[slot]; done += kBlockRows) {
      fn(static_cast<std::int64_t>(slot), begin[slot] + done,
         std::min(kBlockRows, counts[slot] - done));
    }
  }
}

}  // namespace

std::string_view name(Matrix matrix) noexcept {
  switch (matrix) {
    case Matrix::gate: return "gate";
    case Matrix::up: return "up";
    case Matrix::down: return "down";
  }
  return "?";
}

GatedMlp::GatedMlp(const ExpertsConfig& config, std::span<const int> experts,
                   const WeightSource& fill)
    : state_(std::make_unique<State>(config, experts, fill)) {}
GatedMlp::GatedMlp(GatedMlp&&) noexcept = default;
GatedMlp& GatedMlp::operator=(GatedMlp&&) noexcept = default;
GatedMlp::~GatedMlp() = default;

const ExpertsConfig& GatedMlp::config() const noexcept { return state_->config; }
std::int64_t GatedMlp::num_slots() const noexcept { return state_->num_slots; }
std::uint64_t GatedMlp::weight_bytes() const noexcept { return state_->weights.size(); }
const GatedMlp::Implementation& GatedMlp::implementation() const noexcept {
  return state_->implementation;
}

void GatedMlp::forward(ConstTensorView rows, std::span<const std::int64_t> slot_begin,
                       std::span<const std::int64_t> slot_counts, TensorView out) {
  check_rows(state_->config, rows, "rows");
  check_rows(state_->config, out, "out");
  check_segments(state_->num_slots, slot_begin, slot_counts, std::min(rows.rows, out.rows));
  for_blocks(slot_begin, slot_counts,
             [&](std::int64_t slot, std::int64_t first, std::int64_t count) {
               state_->run(slot, state_->block_of(rows, first, count), out, first);
             });
}

void GatedMlp::forward_slots(ConstTensorView rows, std::span<const std::int64_t> slot_counts,
                             TensorView out) {
  const std::int64_t slots = std::max<std::int64_t>(state_->num_slots, 1);
  const std::int64_t rows_per_slot = rows.rows / slots;
  WHERRY_CHECK_ARGUMENT(rows.rows % slots == 0 && out.rows == rows.rows, Stage::experts,
                        "{} rows and {} of out; both must be the same multiple of {} slots",
                        rows.rows, out.rows, state_->num_slots);
  std::vector<std::int64_t> begin;
  for (std::size_t slot = 0; slot < slot_counts.size(); ++slot) {
    WHERRY_CHECK_ARGUMENT(slot_counts[slot] <= rows_per_slot, Stage::experts,
                          "slot {} has {} rows; it holds {}", slot, slot_counts[slot],
                          rows_per_slot);
    begin.push_back(static_cast<std::int64_t>(slot) * rows_per_slot);
  }
  forward(rows, begin, slot_counts, out);
}

namespace {

void check_gathered(const ExpertsConfig& config, std::int64_t num_slots, const Received& received,
                    TensorView out) {
  const std::int64_t rows = received.rows.rows;
  check_rows(config, received.rows, "received.rows");
  check_rows(config, out, "out");
  WHERRY_CHECK_ARGUMENT(out.rows >= rows, Stage::experts, "out has {} rows for {} received",
                        out.rows, rows);
  const auto positions = static_cast<std::int64_t>(received.gather.size());
  check_segments(num_slots, received.slot_begin, received.slot_counts, positions);
  const auto choices = static_cast<std::int64_t>(received.choices.size());
  WHERRY_CHECK_ARGUMENT(rows == 0 ? choices == 0 : choices % rows == 0, Stage::experts,
                        "{} choices for {} received rows", choices, rows);
  for_blocks(received.slot_begin, received.slot_counts,
             [&](std::int64_t slot, std::int64_t first, std::int64_t count) {
               for (std::int64_t at = first; at < first + count; ++at) {
                 const std::int32_t row = received.gather[static_cast<std::size_t>(at)];
                 WHERRY_CHECK_ARGUMENT(row >= 0 && row < rows, Stage::experts,
                                       "position {} of slot {} gathers row {} of {}", at, slot, row,
                                       rows);
               }
             });
  for (const Received::TokenChoice& choice : received.choices) {
    WHERRY_CHECK_ARGUMENT(
        choice.local_slot < 0 || (choice.position >= 0 && choice.position < positions),
        Stage::experts, "a choice of slot {} is at position {} of {}", choice.local_slot,
        choice.position, positions);
  }
}

}  // namespace

void GatedMlp::forward_gathered(const Received& received, TensorView out) {
  State& state = *state_;
  check_gathered(state.config, state.num_slots, received, out);
  const auto positions = static_cast<std::int64_t>(received.gather.size());
  const auto bytes = static_cast<std::size_t>(positions * state.row_bytes());
  if (state.results.size() < bytes) state.results.resize(bytes);
  TensorView results;
  results.data = state.results.data();
  results.dtype = state.config.dtype;
  results.rows = positions;
  results.cols = state.config.hidden;
  for_blocks(received.slot_begin, received.slot_counts,
             [&](std::int64_t slot, std::int64_t first, std::int64_t count) {
               const auto gather = received.gather.subspan(static_cast<std::size_t>(first),
                                                           static_cast<std::size_t>(count));
               state.run(slot, state.gathered_block(received.rows, gather), results, first);
             });
  if (received.rows.rows == 0) return;
  const std::size_t topk = received.choices.size() / static_cast<std::size_t>(received.rows.rows);
  state.team.split(received.rows.rows, [&](std::int64_t begin, std::int64_t end) {
    std::vector<experts::Term> terms;
    for (std::int64_t row = begin; row < end; ++row) {
      terms.clear();
      for (const Received::TokenChoice& choice :
           received.choices.subspan(static_cast<std::size_t>(row) * topk, topk)) {
        if (choice.local_slot < 0) continue;
        terms.push_back({choice.weight, results.row(choice.position)});
      }
      experts::sum_choices(state.config.dtype, terms, state.config.hidden, out.row(row));
    }
  });
}

}  // namespace wherry
