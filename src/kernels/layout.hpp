// The one description of every buffer in a window, compiled by host and device alike.
//
// Every rank registers one window; all windows of a group have the same layout, so an offset that is
// right here is right at every peer. One builder, make_window_layout(), yields sizes and offsets
// together. A window, from low to high offset (every region starts on kRegionAlignment):
//
//   header    fault word, "waiting for" record                   WindowHeader
//   signals   one word per (channel, generation, peer)            SignalWord, 64 bytes apart
//   counts    [2][ranks]                                          CountHeader + num_count_entries int32
//   rows      [depth][row_capacity]                               row_pitch bytes a row
//   scales    [depth]                                             a plane of row_capacity rows' scales
//   scalars   [depth][row_capacity]                               one fp32 a row
//   tokens    [depth][token_row_capacity][topk]                   TokenEntry
//   results   [depth][result_capacity]                            result_pitch bytes a row
//   result_scalars [depth][row_capacity]                          one fp32 a row
//   partials  [depth][partial_capacity]                           partial_pitch bytes a row
//   home_scales [depth][home_capacity]                            home_scale_pitch bytes a row
//
// `rows` and what belongs to them are written by peers in dispatch_send and read by this rank;
// `results` are written by this rank. What goes home, the partials where there are any, else the results,
// is read by the home ranks in combine_recv, together with its scales: pulled. But on GPUs partials are
// pushed: each rank writes what it has of a peer's tokens into that peer's window, in a part of its own.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__)
#define WHERRY_HD __host__ __device__
#else
#define WHERRY_HD
#endif

namespace wherry::layout {

inline constexpr std::uint64_t kRegionAlignment = 4096;  // a page: regions can be populated apart
inline constexpr std::uint64_t kRowAlignment = 16;       // bulk copies move multiples of 16 bytes
inline constexpr std::uint64_t kSignalStride = 64;       // a cache line each: no false sharing
inline constexpr int kCountGenerations = 2;              // design 5.5: plan p proves p-2 was read

[[nodiscard]] WHERRY_HD constexpr std::uint64_t round_up(std::uint64_t value,
                                                         std::uint64_t multiple) noexcept {
  return (value + multiple - 1) / multiple * multiple;
}

// Parts of `total` that are equal but for the last, at most `most` of them, and none empty. Both are 1 or more.
struct Parts {
  std::uint32_t count;
  std::uint32_t each;
};
[[nodiscard]] WHERRY_HD constexpr Parts even_parts(std::uint32_t total,
                                                   std::uint32_t most) noexcept {
  const std::uint32_t each = (total + most - 1) / most;
  return {(total + each - 1) / each, each};
}

// One word that a peer writes, with a doorbell of its own on its cache line: a waiter that sleeps is
// woken by the signal it waits for and by no other.
struct SignalWord {
  std::uint64_t value;     // pack_signal
  std::uint32_t bell;      // futex word, rung when `sleepers` is not 0
  std::uint32_t sleepers;  // threads asleep on `bell`
};
static_assert(sizeof(SignalWord) <= kSignalStride);

// A signal word's value holds (epoch, count) so that one 64-bit store says both "step e is here" and
// "it brought c rows". The epoch is in the high half: the value only grows.
[[nodiscard]] WHERRY_HD constexpr std::uint64_t pack_signal(std::uint32_t epoch,
                                                            std::uint32_t count) noexcept {
  return (static_cast<std::uint64_t>(epoch) << 32) | count;
}
[[nodiscard]] WHERRY_HD constexpr std::uint32_t signal_epoch(std::uint64_t word) noexcept {
  return static_cast<std::uint32_t>(word >> 32);
}
[[nodiscard]] WHERRY_HD constexpr std::uint32_t signal_count(std::uint64_t word) noexcept {
  return static_cast<std::uint32_t>(word);
}

// A signal that is added by parts, one of each of the sender's blocks, in any order: the word holds the signal
// when the last has been added, and its epoch is the one before until then. Counts are below 2^24, so that every
// part is larger than a count. `before`: the word, with none or any of the parts but block 0's; only block 0
// needs it, and `signal`, of the next epoch.
inline constexpr std::uint32_t kMaxSignalParts = 255;
[[nodiscard]] WHERRY_HD constexpr std::uint64_t signal_part(std::uint64_t before,
                                                            std::uint64_t signal,
                                                            std::uint32_t block,
                                                            std::uint32_t blocks) noexcept {
  const std::uint32_t part = 0xFFFFFFFFU / blocks;
  if (block != 0) return part;
  const std::uint64_t old = pack_signal(signal_epoch(before), signal_count(before) % part);
  return signal - old - std::uint64_t{part} * (blocks - 1);
}

// In the count of a dispatch or combine: a scalar for each row has come along. Rows are numbered in 31
// bits, so the bit is free.
inline constexpr std::uint32_t kWithScalars = 0x80000000U;

// What a peer tells this rank, one word per (channel, generation, peer).
enum class Channel : std::uint32_t {
  counts,    // its counts for plan p are in `counts`; kCountGenerations generations
  dispatch,  // its rows of dispatch t are in `rows`
  combine,   // its results of dispatch t can be read
  credit,    // it is done with this generation although no combine said so (design 5.6)
  handover,  // it is done with the window of which another exchange now takes its turn; 1 generation
};
inline constexpr std::uint32_t kNumChannels = 5;

// The first fault seen by this rank or told to it, and what waiting ranks need. Offsets are fixed:
// a peer writes `fault` before it knows anything else.
struct WindowHeader {
  std::uint64_t fault;  // 0, or the first cause (pack_fault)
  std::uint64_t
      waiting;  // 0, or what this rank sleeps for (pack_waiting): lets others wake it, and
                // find the root
};

// Counts of one source rank for one plan: a header, then int32 entries: rows for each of the
// num_slots slots, then token rows for each of the ranks.
struct CountHeader {
  std::int32_t status;  // 0 good; otherwise a PlanFault, and the fields below say where
  std::int32_t token;
  std::int32_t choice;
  std::int32_t tokens;  // tokens of the source rank in this plan
  std::int64_t id;      // of a good routing a hash, where ranks must bring the same (replicated)
  std::uint64_t placement;  // a hash of where the source rank believes the experts to be
};
inline constexpr std::uint64_t kCountHeaderBytes = 32;
static_assert(sizeof(CountHeader) <= kCountHeaderBytes);

// One (token, choice) of a received token row: its place among the grouped rows of this rank and
// its weight. position is -1 where the choice went to another rank, is -1 itself or was dropped.
struct TokenEntry {
  std::int32_t position;
  float weight;
};

struct WindowParams {
  std::uint64_t ranks = 0;
  std::uint64_t num_slots = 0;  // of all ranks
  std::uint64_t topk = 0;
  std::uint64_t depth = 0;
  std::uint64_t row_bytes = 0;          // of one row in `rows`
  std::uint64_t scale_plane_bytes = 0;  // of the scales of row_capacity rows; 0: rows have none
  std::uint64_t result_bytes = 0;       // of one row in `results`; 0: rows cannot be summed
  std::uint64_t partial_bytes = 0;      // of one row in `partials`
  std::uint64_t home_scale_bytes = 0;   // of the scales of one row that goes home; 0: it has none
  std::uint64_t row_capacity = 0;
  std::uint64_t token_row_capacity = 0;  // 0: no `tokens` region
  std::uint64_t result_capacity = 0;
  std::uint64_t partial_capacity = 0;  // 0: no `partials` region
  std::uint64_t scalar_capacity = 0;   // rows that may carry a scalar
};

// Sizes and offsets in bytes. Trivially copyable: kernels take it by value.
struct WindowLayout {
  std::uint64_t ranks, topk, depth;
  std::uint64_t num_count_entries, counts_stride;
  std::uint64_t row_bytes, row_pitch, row_capacity, token_row_capacity;
  std::uint64_t result_bytes, result_pitch, result_capacity, scalar_capacity;
  std::uint64_t partial_bytes, partial_pitch, partial_capacity;
  std::uint64_t
      pushed_capacity;  // partials that one rank may push: max_tokens (GPUs have no replicated groups)
  std::uint64_t scale_plane_bytes, home_scale_pitch, home_capacity;
  std::uint64_t signals, counts, rows, scales, scalars, tokens, results, result_scalars, partials,
      home_scales;
  std::uint64_t bytes;  // of the whole window

  // Generations a channel has.
  [[nodiscard]] WHERRY_HD constexpr std::uint64_t generations(Channel channel) const noexcept {
    if (channel == Channel::counts) return static_cast<std::uint64_t>(kCountGenerations);
    return channel == Channel::handover ? 1 : depth;
  }
  // The SignalWord in a window that `peer` writes.
  [[nodiscard]] WHERRY_HD constexpr std::uint64_t signal(Channel channel, std::uint64_t generation,
                                                         std::uint64_t peer) const noexcept {
    const std::uint64_t before = channel == Channel::counts
                                     ? 0
                                     : static_cast<std::uint64_t>(kCountGenerations) +
                                           (static_cast<std::uint64_t>(channel) - 1) * depth;
    return signals + ((before + generation) * ranks + peer) * kSignalStride;
  }
  // Counts of source rank `peer`: a CountHeader; the entries follow kCountHeaderBytes later.
  [[nodiscard]] WHERRY_HD constexpr std::uint64_t count_message(std::uint64_t generation,
                                                                std::uint64_t peer) const noexcept {
    return counts + (generation * ranks + peer) * counts_stride;
  }
  [[nodiscard]] WHERRY_HD constexpr std::uint64_t row(std::uint64_t generation,
                                                      std::uint64_t at) const noexcept {
    return rows + (generation * row_capacity + at) * row_pitch;
  }
  [[nodiscard]] WHERRY_HD constexpr std::uint64_t scale_plane(
      std::uint64_t generation) const noexcept {
    return scales + generation * scale_plane_bytes;
  }
  [[nodiscard]] WHERRY_HD constexpr std::uint64_t scalar(std::uint64_t generation,
                                                         std::uint64_t at) const noexcept {
    return scalars + (generation * scalar_capacity + at) * sizeof(float);
  }
  [[nodiscard]] WHERRY_HD constexpr std::uint64_t token_entries(std::uint64_t generation,
                                                                std::uint64_t at) const noexcept {
    return tokens + (generation * token_row_capacity + at) * topk * sizeof(TokenEntry);
  }
  [[nodiscard]] WHERRY_HD constexpr std::uint64_t result(std::uint64_t generation,
                                                         std::uint64_t at) const noexcept {
    return results + (generation * result_capacity + at) * result_pitch;
  }
  [[nodiscard]] WHERRY_HD constexpr std::uint64_t result_scalar(std::uint64_t generation,
                                                                std::uint64_t at) const noexcept {
    return result_scalars + (generation * scalar_capacity + at) * sizeof(float);
  }
  [[nodiscard]] WHERRY_HD constexpr std::uint64_t partial(std::uint64_t generation,
                                                          std::uint64_t at) const noexcept {
    return partials + (generation * partial_capacity + at) * partial_pitch;
  }
  // Which partial the `at`-th token row that this rank has sent to `peer` becomes, where they are pushed. (What is
  // not converted is pushed by others only: combine_partials.cu keeps sums of its own tokens in its own part.)
  [[nodiscard]] WHERRY_HD constexpr std::uint64_t pushed(std::uint64_t peer,
                                                         std::uint64_t at) const noexcept {
    return peer * pushed_capacity + at;
  }
  // The scales of result or partial `at`, whichever goes home.
  [[nodiscard]] WHERRY_HD constexpr std::uint64_t home_scale(std::uint64_t generation,
                                                             std::uint64_t at) const noexcept {
    return home_scales + (generation * home_capacity + at) * home_scale_pitch;
  }
};

// Bytes of header, signals and counts: what exchanges that share a window each have of their own.
[[nodiscard]] constexpr std::uint64_t control_bytes(const WindowParams& p) noexcept;

// `rows_begin`: where `rows` starts at the earliest, 0 for right behind the counts. Exchanges that
// share a window pass what lies between their header and the common rows.
[[nodiscard]] constexpr WindowLayout make_window_layout(const WindowParams& p,
                                                        std::uint64_t rows_begin = 0) noexcept {
  WindowLayout l{};
  l.ranks = p.ranks;
  l.topk = p.topk;
  l.depth = p.depth;
  l.num_count_entries = p.num_slots + p.ranks;
  l.counts_stride =
      round_up(kCountHeaderBytes + l.num_count_entries * sizeof(std::int32_t), kSignalStride);
  l.row_bytes = p.row_bytes;
  l.row_pitch = round_up(p.row_bytes, kRowAlignment);
  l.row_capacity = p.row_capacity;
  l.token_row_capacity = p.token_row_capacity;
  l.result_bytes = p.result_bytes;
  l.result_pitch = round_up(p.result_bytes, kRowAlignment);
  l.result_capacity = p.result_capacity;
  l.partial_bytes = p.partial_bytes;
  l.partial_pitch = round_up(p.partial_bytes, kRowAlignment);
  l.partial_capacity = p.partial_capacity;
  l.pushed_capacity = p.ranks == 0 ? 0 : p.partial_capacity / p.ranks;
  l.scalar_capacity = p.scalar_capacity;
  l.scale_plane_bytes = round_up(p.scale_plane_bytes, kRowAlignment);
  l.home_scale_pitch = round_up(p.home_scale_bytes, kRowAlignment);
  l.home_capacity = p.partial_capacity != 0 ? p.partial_capacity : p.result_capacity;

  std::uint64_t end = sizeof(WindowHeader);
  const auto region = [&end](std::uint64_t bytes) {
    const std::uint64_t begin = round_up(end, kRegionAlignment);
    end = begin + bytes;
    return begin;
  };
  const std::uint64_t words = kCountGenerations + (kNumChannels - 2) * p.depth + 1;
  l.signals = region(words * p.ranks * kSignalStride);
  l.counts = region(kCountGenerations * p.ranks * l.counts_stride);
  end = end < rows_begin ? rows_begin : end;
  l.rows = region(p.depth * p.row_capacity * l.row_pitch);
  l.scales = region(p.depth * l.scale_plane_bytes);
  l.scalars = region(p.depth * p.scalar_capacity * sizeof(float));
  l.tokens = region(p.depth * p.token_row_capacity * p.topk * sizeof(TokenEntry));
  l.results = region(p.depth * p.result_capacity * l.result_pitch);
  l.result_scalars = region(p.depth * p.scalar_capacity * sizeof(float));
  l.partials = region(p.depth * p.partial_capacity * l.partial_pitch);
  l.home_scales = region(p.depth * l.home_capacity * l.home_scale_pitch);
  l.bytes = round_up(end, kRegionAlignment);
  return l;
}

constexpr std::uint64_t control_bytes(const WindowParams& p) noexcept {
  return make_window_layout(p).rows;
}

// Fault words: 0 is none, so the cause is never 0.
struct Fault {
  std::uint32_t cause = 0;     // an ErrorCode + 1
  std::uint32_t stage = 0;     // a Stage
  std::uint32_t blamed = 0;    // the rank that failed
  std::uint32_t reporter = 0;  // the rank that noticed
  std::uint32_t step = 0;      // low 16 bits of the step
};
[[nodiscard]] WHERRY_HD constexpr std::uint64_t pack_fault(const Fault& f) noexcept {
  return (static_cast<std::uint64_t>(f.cause & 0xFFU) << 56) |
         (static_cast<std::uint64_t>(f.stage & 0xFFU) << 48) |
         (static_cast<std::uint64_t>(f.blamed & 0xFFFFU) << 32) |
         (static_cast<std::uint64_t>(f.reporter & 0xFFFFU) << 16) | (f.step & 0xFFFFU);
}
[[nodiscard]] WHERRY_HD constexpr Fault unpack_fault(std::uint64_t word) noexcept {
  return {static_cast<std::uint32_t>(word >> 56), static_cast<std::uint32_t>(word >> 48) & 0xFFU,
          static_cast<std::uint32_t>(word >> 32) & 0xFFFFU,
          static_cast<std::uint32_t>(word >> 16) & 0xFFFFU,
          static_cast<std::uint32_t>(word) & 0xFFFFU};
}

// What a sleeping rank waits for: (peer, channel, generation) and the low half of the epoch. Never 0.
struct Waiting {
  std::uint32_t peer = 0;
  std::uint32_t channel = 0;
  std::uint32_t generation = 0;
  std::uint32_t epoch = 0;
};
[[nodiscard]] WHERRY_HD constexpr std::uint64_t pack_waiting(const Waiting& w) noexcept {
  return (static_cast<std::uint64_t>(w.peer + 1) << 48) |
         (static_cast<std::uint64_t>(w.channel & 0xFU) << 44) |
         (static_cast<std::uint64_t>(w.generation & 0xFFFU) << 32) | w.epoch;
}
[[nodiscard]] WHERRY_HD constexpr Waiting unpack_waiting(std::uint64_t word) noexcept {
  return {static_cast<std::uint32_t>(word >> 48) - 1, static_cast<std::uint32_t>(word >> 44) & 0xFU,
          static_cast<std::uint32_t>(word >> 32) & 0xFFFU, static_cast<std::uint32_t>(word)};
}

}  // namespace wherry::layout
