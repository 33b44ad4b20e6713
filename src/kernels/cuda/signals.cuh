// Memory order between ranks: the only file that holds PTX for it. Every helper names its scope,
// and scripts/check_ptx.sh reads the compiled kernels for them, because a single GPU does not show
// a scope that is too small.
//
// Rows. Sender: payload; block barrier; atom.acq_rel.gpu counts the rank's blocks; the last block
// runs fence.acq_rel.sys and writes one word to each peer (st.relaxed.sys: with the fence before it,
// a release). Or: payload; block barrier; every block runs the fence and adds its part to each word
// (red.relaxed.sys.add), which holds the epoch when all have added. Receiver: ld.acquire.sys until the
// word holds the epoch; block barrier; then ordinary loads, or fence.proxy.async and bulk loads. Never a
// non-coherent load of memory that peers write.
//
// Counts. Each 8-byte word carries its own epoch: st.relaxed.sys, and ld.relaxed.sys until the word
// holds the epoch. There is no payload but the word, so nothing needs an order.
#pragma once

#include <cstdint>

#include "kernels/cuda/args.hpp"
#include "wherry/error.hpp"

namespace wherry::kernels::cuda {

__device__ inline std::uint64_t load_acquire_system(const std::uint64_t* from) {
  std::uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
  return value;
}
__device__ inline std::uint64_t load_relaxed_system(const std::uint64_t* from) {
  std::uint64_t value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
  return value;
}
// A signal. A release store would fence a second time (0.5 us).
__device__ inline void store_signal_after_fence(std::uint64_t* to, std::uint64_t value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}
// A part of a signal (layout::signal_part), likewise.
__device__ inline void add_to_signal_after_fence(std::uint64_t* to, std::uint64_t value) {
  asm volatile("red.relaxed.sys.global.add.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}
// No signal: what the host may look at whenever it likes.
__device__ inline void store_for_host(std::uint64_t* to, std::uint64_t value) {
  asm volatile("st.volatile.global.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}
__device__ inline void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
// Puts `desired` where 0 was; returns what was there.
__device__ inline std::uint64_t replace_zero_system(std::uint64_t* at, std::uint64_t desired) {
  std::uint64_t before;
  asm volatile("atom.acq_rel.sys.global.cas.b64 %0, [%1], %2, %3;"
               : "=l"(before)
               : "l"(at), "l"(std::uint64_t{0}), "l"(desired)
               : "memory");
  return before;
}
// Counts to `last` and back to 0; returns the count before.
__device__ inline std::uint32_t count_and_wrap_gpu(std::uint32_t* counter, std::uint32_t last) {
  std::uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(counter), "r"(last)
               : "memory");
  return before;
}
// Returns the count before. Not an addition, nor what the compiler makes one (inc of up to ~0): it adds for a whole
// warp and hands out the sums, so that the result is waited for at once, not where it is used.
__device__ inline std::uint32_t count_gpu(std::uint32_t* counter) {
  std::uint32_t before;
  asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], 0xFFFFFFFE;"
               : "=r"(before)
               : "l"(counter)
               : "memory");
  return before;
}
__device__ inline std::uint64_t global_nanoseconds() {
  std::uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

template <typename T>
__device__ T* own_window_at(const RankContext& context, std::uint64_t offset) {
  return reinterpret_cast<T*>(context.own + offset);
}
template <typename T>
__device__ T* window_at(const RankContext& context, int rank, std::uint64_t offset) {
  return reinterpret_cast<T*>(context.windows[rank] + offset);
}
__device__ inline std::uint64_t* own_fault_word(const RankContext& context) {
  return &own_window_at<layout::WindowHeader>(context, 0)->fault;
}

// --- Faults -----------------------------------------------------------------------------------

// Which wait of which step; generations take turns, so the step follows from the epoch.
struct StageInfo {
  Stage stage;
  layout::Channel channel;
  std::uint32_t generation;
  std::uint32_t epoch;
};

// Whoever learns of a fault tells the host and all peers before it leaves. A rank that was told and ended,
// while others were not told yet, would be blamed by those that wait for it.
__device__ __noinline__ inline void pass_fault_on(const RankContext& context, std::uint64_t fault) {
  store_for_host(context.fault_record, fault);
  for (int peer = 0; peer < context.ranks; ++peer) {
    if (peer == context.rank) continue;
    replace_zero_system(&window_at<layout::WindowHeader>(context, peer, 0)->fault, fault);
  }
}

// The first cause wins here and at every peer; the host reads it in pinned memory.
// Not inlined: code that hardly ever runs would only stand in the way of the code that does.
__device__ __noinline__ inline void report_fault(const RankContext& context, StageInfo info,
                                                 ErrorCode code, int blamed) {
  const std::uint64_t generations = context.layout.generations(info.channel);
  const std::uint64_t fault = layout::pack_fault(
      {.cause = static_cast<std::uint32_t>(code) + 1,
       .stage = static_cast<std::uint32_t>(info.stage),
       .blamed = static_cast<std::uint32_t>(blamed),
       .reporter = static_cast<std::uint32_t>(context.rank),
       .step = static_cast<std::uint32_t>((info.epoch - 1) * generations + info.generation + 1)});
  const std::uint64_t before = replace_zero_system(own_fault_word(context), fault);
  pass_fault_on(context, before == 0 ? fault : before);
}

// --- Beginning and end of a stage --------------------------------------------------------------

struct StageBegin {
  bool failed;          // the exchange has failed earlier: leave at once
  std::uint32_t epoch;  // the one this launch is about
};

// What one thread of a block asks for before anything else; `previous` is the epoch counter that the
// last block of this launch to be done, or to have looked, advances; so no block reads it too late.
struct StageLook {
  std::uint32_t before;
  std::uint64_t fault;
};
__device__ inline StageLook look_at_stage(const RankContext& context,
                                          const std::uint32_t& previous) {
  if (threadIdx.x != 0) return {0, 0};
  return {previous, load_relaxed_system(own_fault_word(context))};
}
// Called by all threads of every block, with what look_at_stage() returned.
__device__ inline StageBegin begin_stage(const RankContext& context, const StageLook& look) {
  __shared__ std::uint32_t epoch;
  __shared__ bool failed;
  if (threadIdx.x == 0) {
    if (look.fault != 0) pass_fault_on(context, look.fault);
    failed = look.fault != 0;
    epoch = look.before + 1;
  }
  __syncthreads();
  return {failed, epoch};
}
__device__ inline StageBegin begin_stage(const RankContext& context,
                                         const std::uint32_t& previous) {
  return begin_stage(context, look_at_stage(context, previous));
}

// One thread of each of `blocks` blocks, when it will not read its epoch counter again: true in the
// block that comes last, where the items of the stage are counted from 0 again: whoever took one has used its
// number before it arrived here. Orders nothing else: what follows in the stream comes after the kernel anyway.
// Without the release a small step saves about a microsecond.
__device__ inline bool is_last_to_leave(RankState& state, Arrival arrival, std::uint32_t blocks) {
  const auto at = static_cast<std::uint32_t>(arrival);
  const bool last = blocks == 1 || atomicInc(&state.arrived[at], blocks - 1) == blocks - 1;
  if (last) state.taken[at] = 0;
  return last;
}

// True in all threads of the block that comes last of its rank's `blocks` blocks; what all of them
// wrote before is then visible to it. Both counters are 0 again for the next launch.
__device__ inline bool is_last_block(RankState& state, Arrival arrival, std::uint32_t blocks) {
  __shared__ bool last;
  const auto at = static_cast<std::uint32_t>(arrival);
  __syncthreads();
  if (threadIdx.x == 0) {
    last = blocks == 1 || count_and_wrap_gpu(&state.arrived[at], blocks - 1) == blocks - 1;
  }
  if (blocks != 1) __syncthreads();
  const bool is_last = blocks == 1 || last;
  // Not by a thread that will signal: its fence would wait for the store.
  if (is_last && threadIdx.x == blockDim.x - 1) state.taken[at] = 0;
  return is_last;
}

// One warp: one strong signal to every peer. count_for(peer) is told along. `windows`: those of the
// context, or a copy in shared memory.
template <typename CountFor>
__device__ void signal_peers(const RankContext& context, std::byte* const* windows,
                             layout::Channel channel, std::uint32_t generation, std::uint32_t epoch,
                             CountFor count_for) {
  const std::uint64_t mine =
      context.layout.signal(channel, generation, static_cast<std::uint64_t>(context.rank));
  for (int peer = static_cast<int>(threadIdx.x % 32); peer < context.ranks; peer += 32) {
    const std::uint32_t count = count_for(peer);
    auto* word = reinterpret_cast<std::uint64_t*>(windows[peer] + mine);
    fence_system();  // empties the cache
    store_signal_after_fence(word, layout::pack_signal(epoch, count));
  }
}
template <typename CountFor>
__device__ void signal_peers(const RankContext& context, layout::Channel channel,
                             std::uint32_t generation, std::uint32_t epoch, CountFor count_for) {
  signal_peers(context, context.windows, channel, generation, epoch, count_for);
}

// --- Waiting ----------------------------------------------------------------------------------

// One thread that polls, now and then: whether to go on. `started` is 0 at the first look.
__device__ __noinline__ inline bool may_wait_on(const RankContext& context, StageInfo info,
                                                int peer, std::uint64_t& started) {
  const std::uint64_t fault = load_relaxed_system(own_fault_word(context));
  if (fault != 0) {
    pass_fault_on(context, fault);
    return false;
  }
  const std::uint64_t now = global_nanoseconds();
  if (started == 0) started = now;
  if (now - started <= context.deadline_ns) return true;
  report_fault(context, info, ErrorCode::timeout, peer);
  return false;
}
// One thread that polls: looks at the clock and the fault word only now and then.
class Patience {
 public:
  __device__ bool lasts(const RankContext& context, const StageInfo& info, int peer) {
    constexpr int kPollsBetweenLooks = 64;
    return ++polls_ % kPollsBetweenLooks != 0 || may_wait_on(context, info, peer, started_);
  }

 private:
  int polls_ = 0;
  std::uint64_t started_ = 0;
};

// One thread: until `peer` has signalled the epoch. expected_count < 0: any count is right.
__device__ inline bool wait_for_peer(const RankContext& context, const StageInfo& info, int peer,
                                     std::int64_t expected_count) {
  const auto* word = own_window_at<std::uint64_t>(
      context,
      context.layout.signal(info.channel, info.generation, static_cast<std::uint64_t>(peer)));
  Patience patience;
  for (;;) {
    const std::uint64_t seen = load_acquire_system(word);
    const std::uint32_t epoch = layout::signal_epoch(seen);
    if (epoch == info.epoch) {
      if (expected_count < 0 || layout::signal_count(seen) == expected_count) return true;
      report_fault(context, info, ErrorCode::internal, peer);
      return false;
    }
    if (epoch > info.epoch) {  // nobody may be ahead of a rank that has not finished this step
      report_fault(context, info, ErrorCode::internal, peer);
      return false;
    }
    if (!patience.lasts(context, info, peer)) return false;
  }
}

// One block, all threads: until every peer has signalled. False in all threads if one did not.
// expected_count(peer) as above.
template <typename ExpectedCount>
__device__ bool wait_for_peers(const RankContext& context, const StageInfo& info,
                               ExpectedCount expected_count) {
  int missing = 0;
  for (int peer = static_cast<int>(threadIdx.x); peer < context.ranks && missing == 0;
       peer += static_cast<int>(blockDim.x)) {
    if (!wait_for_peer(context, info, peer, expected_count(peer))) missing = 1;
  }
  return __syncthreads_or(missing) == 0;
}

// --- Words that carry their epoch ---------------------------------------------------------------

// Two words, each of 48 bits of data under 16 bits of epoch. Each is stored and loaded whole, so
// whoever polls for the data has it with the load that shows the epoch: one trip, no fence. A word
// holds the epoch before until it is written again, so 16 bits tell the two apart for ever.
struct alignas(16) WordPair {
  std::uint64_t first;
  std::uint64_t second;
};
inline constexpr int kWordDataBits = 48;
inline constexpr std::uint64_t kWordData = (std::uint64_t{1} << kWordDataBits) - 1;

__device__ inline std::uint64_t pack_word(std::uint32_t epoch, std::uint64_t data) {
  return (static_cast<std::uint64_t>(epoch) << kWordDataBits) | (data & kWordData);
}
__device__ inline bool holds_epoch(const WordPair& pair, std::uint32_t epoch) {
  const std::uint64_t differs =
      (pair.first ^ pack_word(epoch, 0)) | (pair.second ^ pack_word(epoch, 0));
  return differs >> kWordDataBits == 0;
}
__device__ inline void store_pair_system(WordPair* to, const WordPair& pair) {
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(to), "l"(pair.first),
               "l"(pair.second)
               : "memory");
}
__device__ inline WordPair load_pair_system(const WordPair* from) {
  WordPair pair;
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(pair.first), "=l"(pair.second)
               : "l"(from)
               : "memory");
  return pair;
}

// One thread: until the first `count` of kPairs pairs, `stride` bytes apart, hold the epoch; all loads
// are in flight together. Pair i is what rank first_peer + i * peer_step owes.
template <int kPairs>
__device__ bool receive_pairs(const RankContext& context, const StageInfo& info,
                              const std::byte* from, std::uint64_t stride, int count,
                              int first_peer, int peer_step, WordPair (&pairs)[kPairs]) {
  Patience patience;
  for (;;) {
    int missing = -1;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      if (i < count) {
        pairs[i] = load_pair_system(
            reinterpret_cast<const WordPair*>(from + static_cast<std::uint64_t>(i) * stride));
      }
    }
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      if (i < count && !holds_epoch(pairs[i], info.epoch)) missing = i;
    }
    if (missing < 0) return true;
    if (!patience.lasts(context, info, first_peer + missing * peer_step)) return false;
  }
}

}  // namespace wherry::kernels::cuda
