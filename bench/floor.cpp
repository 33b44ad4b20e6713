#include "floor.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <span>

#include "group/state.hpp"

namespace wherry::bench {

namespace {

constexpr std::int64_t kHeader = 4096;  // what a fabric keeps at the start of a window

std::int64_t lines(Wire wire, const ExchangeConfig& config) {
  constexpr std::int64_t kLine = 64;
  return (wire_format(wire, config.dtype, config.hidden).row_bytes() + kLine - 1) / kLine * kLine;
}

// Somebody must use what read_row() returns.
std::atomic<std::uint64_t> sink{0};

std::int64_t most_of_all(const Group& group, std::int64_t mine) {
  std::int64_t most = 0;
  for (const Group::Bytes& bytes : group.allgather(std::as_bytes(std::span(&mine, 1)))) {
    std::int64_t theirs = 0;
    std::memcpy(&theirs, bytes.data(), sizeof(theirs));
    most = std::max(most, theirs);
  }
  return most;
}

}  // namespace

Floor::Floor(const Group& group, const ExchangeConfig& config, const PlanData& plan)
    : sent_bytes_(lines(config.dispatch_wire, config)),
      home_bytes_(lines(config.combine_wire, config)),
      pitch_(std::max(sent_bytes_, home_bytes_)),
      x_(plan.tokens, sent_bytes_),
      place_begin_{0},
      out_(plan.tokens, lines(Wire::same, config)),
      hot_(1, out_.pitch()),
      team_(config.num_threads) {
  // One row per (token, rank) in `tokens`, else one per (token, slot).
  const bool token_rows = config.layout == Layout::tokens;
  std::int64_t rows = 1;  // how many a window needs, as far as this rank knows
  for (std::int64_t token = 0; token < plan.tokens; ++token) {
    const std::int64_t first = place_begin_.back();
    for (std::int64_t k = 0; k < plan.topk; ++k) {
      const auto at = static_cast<std::size_t>(token * plan.topk + k);
      if (plan.row[at] < 0 || plan.repeat[at] != 0) continue;
      const Place place{plan.dest[at], token_rows ? plan.token_row[at] : plan.row[at]};
      const auto same = [&](const Place& other) {
        return other.peer == place.peer && other.row == place.row;
      };
      if (std::any_of(places_.begin() + first, places_.end(), same)) continue;
      places_.push_back(place);
      rows = std::max(rows, place.row + 1);
    }
    place_begin_.push_back(static_cast<std::int64_t>(places_.size()));
  }
  const std::int64_t bytes = kHeader + most_of_all(group, rows) * pitch_;
  fabric_ = group.state().connect(
      group, {static_cast<std::uint64_t>(bytes), config.populate, config.deadline});
  group.barrier();
}

std::byte* Floor::row(const Place& place) const noexcept {
  return fabric_->window(place.peer) + kHeader + place.row * pitch_;
}

std::int64_t Floor::bytes() const noexcept {
  const auto rows = static_cast<std::int64_t>(places_.size());
  return rows * (2 * sent_bytes_ + home_bytes_) + out_.rows() * out_.pitch();
}

Floor::Pass Floor::run(Meeting& meeting, Stores stores) {
  Pass pass{};
  meeting.meet();
  pass.dispatch_begin = now_ns();
  team_.split(x_.rows(), [&](auto begin, auto end) { copy_rows(begin, end, stores); });
  pass.dispatch_end = now_ns();
  meeting.meet();
  pass.combine_begin = now_ns();
  team_.split(x_.rows(), [&](auto begin, auto end) { gather_rows(begin, end, stores); });
  pass.combine_end = now_ns();
  meeting.meet();
  return pass;
}

void Floor::copy_rows(std::int64_t begin, std::int64_t end, Stores stores) {
  const auto bytes = static_cast<std::size_t>(sent_bytes_);
  for (std::int64_t token = begin; token < end; ++token) {
    for (std::int64_t i = place_begin_[static_cast<std::size_t>(token)];
         i < place_begin_[static_cast<std::size_t>(token) + 1]; ++i) {
      copy_row(row(places_[static_cast<std::size_t>(i)]), x_.row<std::byte>(token), bytes, stores);
    }
  }
  finish_copies();
}

void Floor::gather_rows(std::int64_t begin, std::int64_t end, Stores stores) {
  const auto bytes = static_cast<std::size_t>(home_bytes_);
  const bool same = home_bytes_ == out_.pitch();
  std::uint64_t sum = 0;
  for (std::int64_t token = begin; token < end; ++token) {
    const std::int64_t last = place_begin_[static_cast<std::size_t>(token) + 1] - 1;
    std::int64_t i = place_begin_[static_cast<std::size_t>(token)];
    for (; i < last; ++i) sum += read_row(row(places_[static_cast<std::size_t>(i)]), bytes);
    if (i > last) continue;  // no row at all
    const std::byte* const from = row(places_[static_cast<std::size_t>(i)]);
    if (!same) sum += read_row(from, bytes);
    copy_row(out_.row<std::byte>(token), same ? from : hot_.row<std::byte>(0),
             static_cast<std::size_t>(out_.pitch()), stores);
  }
  finish_copies();
  sink.fetch_add(sum, std::memory_order_relaxed);
}

}  // namespace wherry::bench
