// Stage 2, first half, for few tokens: every entry (a slot, or a rank) has a bit for each token that
// goes there. Bits are set in any order by any thread, a slot that a token chooses twice sets one bit,
// and the rows before a token's are the bits below its own. So no thread waits for the tokens before
// its own, and there is nothing to sum over warps.
#pragma once

#include "kernels/cuda/counting.cuh"

namespace wherry::kernels::cuda {

inline constexpr int kMarkTokens = 32;  // of a word

__host__ __device__ constexpr int num_mark_words(int tokens) {
  return tokens > kMarkTokens ? (tokens + kMarkTokens - 1) / kMarkTokens : 1;
}

// Shared memory, zeros before: [num_mark_words][entries].
struct Marks {
  std::uint32_t* words;
  int entries;  // a multiple of 4
  int count;    // words of an entry
};

// Rows of `entry` that tokens before `token` take.
__device__ inline std::int32_t marked_before(const Marks& marks, std::int32_t entry,
                                             std::uint32_t token) {
  const std::uint32_t* at = marks.words + entry;
  std::int32_t before = 0;
#pragma unroll 1
  for (std::uint32_t word = 0; word < token / kMarkTokens; ++word, at += marks.entries) {
    before += __popc(*at);
  }
  return before + __popc(*at & ((1U << (token % kMarkTokens)) - 1U));
}

// One thread: how many tokens go to each of four entries.
__device__ inline int4 count_marks(const Marks& marks, int quad) {
  int4 sum{0, 0, 0, 0};
  const auto* at = reinterpret_cast<const uint4*>(marks.words) + quad;
#pragma unroll 1
  for (int word = 0; word < marks.count; ++word, at += marks.entries / 4) {
    const uint4 bits = *at;
    sum = plus(sum, {__popc(bits.x), __popc(bits.y), __popc(bits.z), __popc(bits.w)});
  }
  return sum;
}

// The ids of a thread's first two choices: `threads` threads take one after the other.
__device__ inline FirstIds load_first_choices(const CountArgs& args, std::uint32_t choices,
                                              std::uint32_t thread, std::uint32_t threads) {
  return {thread < choices ? load_id(args, thread) : -1,
          thread + threads < choices ? load_id(args, thread + threads) : -1};
}

// Marks this thread's choices of the rank, after a barrier. The slots of tokens [begin, end) are kept in
// slots_of_chunk; the smallest bad choice goes to `bad`.
__device__ inline void mark_choices(const CountArgs& args, const CountShared& shared,
                                    const Marks& marks, FirstIds ids, std::uint32_t thread,
                                    std::uint32_t threads, std::uint32_t begin, std::uint32_t end,
                                    std::int32_t* slots_of_chunk, unsigned long long* bad) {
  const auto topk = static_cast<std::uint32_t>(args.context.topk);
  const std::uint32_t choices = static_cast<std::uint32_t>(args.plan.tokens) * topk;
#pragma unroll 1
  for (std::uint32_t at = thread; at < choices; at += threads) {
    const std::uint32_t later = at + 2 * threads;
    const std::int64_t later_id = later < choices ? load_id(args, later) : -1;
    const std::uint32_t token = at / topk;
    std::int32_t slot = -1;
    if (ids.now >= 0 && ids.now < args.placement.experts) {
      slot = slot_for(args, shared, ids.now, token);
      const std::uint32_t bit = 1U << (token % kMarkTokens);
      std::uint32_t* words = marks.words + token / kMarkTokens * marks.entries;
      atomicOr(words + slot, bit);
      atomicOr(words + args.placement.slots + shared.slot_rank[slot], bit);
    } else if (ids.now != -1) {
      atomicMin(bad, static_cast<unsigned long long>(at));
    }
    if (at >= begin * topk && at < end * topk) slots_of_chunk[at - begin * topk] = slot;
    ids = {ids.next, later_id};
  }
}

}  // namespace wherry::kernels::cuda
