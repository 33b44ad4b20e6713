// Sums of rows in fp32, the arithmetic of combine, for each type of row (elements.cuh): a warp sums one token, or a part of one.
// The terms wait in shared memory, where all lanes read them at once: eight pointers and weights in
// registers would leave too few of those for the rows in flight.
#pragma once

#include <cstdint>

#include "kernels/cuda/choices.cuh"
#include "kernels/cuda/elements.cuh"

namespace wherry::kernels::cuda {

inline constexpr int kMaxSumThreads = 1024;

enum class Arithmetic {
  plain,     // total = total + x
  weighted,  // total = fma(weight, x, total)
  ranked,    // weighted within a rank; each rank's part is rounded to the row's type, then added
};

// ranked: what of its rank's part a term is.
enum class OfRank : std::int32_t {
  some,   // others follow
  last,   // with it the part is complete
  whole,  // the part itself, rounded already
};
struct Term {
  const std::byte* row;
  float weight;
  OfRank of_rank;
};
using WarpTerms = Term[kMaxTopk];

// Puts this lane's term in place `order` of its warp's list.
template <typename Each>
__device__ void put_term(Each (&terms)[kMaxTopk], bool present, int order, const Each& term) {
  __syncwarp();  // the list's last readers are done
  if (present) terms[order] = term;
  __syncwarp();
}

// Writes what lies inside a row whose end or address is no multiple of 16 bytes.
template <typename Element>
__device__ void store_odd(std::byte* out, std::uint32_t vector, const uint4& packed,
                          std::uint32_t row_bytes) {
  const std::uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
  const bool words_aligned = reinterpret_cast<std::uintptr_t>(out) % 4 == 0;
#pragma unroll
  for (std::uint32_t i = 0; i < 4; ++i) {
    const std::uint32_t at = vector * 16 + 4 * i;
    if (words_aligned && at + 4 <= row_bytes) {
      *reinterpret_cast<std::uint32_t*>(out + at) = words[i];
      continue;
    }
    if constexpr (Element::kBytes == 2) {
      if (at < row_bytes) {
        *reinterpret_cast<std::uint16_t*>(out + at) = static_cast<std::uint16_t>(words[i]);
      }
      if (at + 2 < row_bytes) {
        *reinterpret_cast<std::uint16_t*>(out + at + 2) =
            static_cast<std::uint16_t>(words[i] >> 16);
      }
    }
  }
}

// Where a warp's sum goes: vectors [first, end) of a row at `out`.
struct SumTarget {
  std::byte* out;
  bool aligned;  // out and row_bytes are multiples of 16 bytes; rows in windows always are
  std::uint32_t row_bytes;
  std::uint32_t first;
  std::uint32_t end;
  const std::byte* addend;  // a row that is the last term of the sum, or null
};
// Any address: 16 bytes if it allows, else what of them lies inside the row.
template <typename Element>
__device__ uint4 load_odd(const std::byte* row, std::uint32_t vector, std::uint32_t row_bytes) {
  const std::byte* from = row + vector * 16;
  if (reinterpret_cast<std::uintptr_t>(from) % 16 == 0 && vector * 16 + 16 <= row_bytes) {
    return __ldcs(reinterpret_cast<const uint4*>(from));
  }
  std::uint32_t words[4] = {0, 0, 0, 0};
#pragma unroll
  for (std::uint32_t at = 0; at < 16; at += Element::kBytes) {
    if (vector * 16 + at >= row_bytes) continue;
    std::uint32_t element;
    if constexpr (Element::kBytes == 2) {
      element = *reinterpret_cast<const std::uint16_t*>(from + at);
    } else {
      element = *reinterpret_cast<const std::uint32_t*>(from + at);
    }
    words[at / 4] |= element << (at % 4 * 8);
  }
  return {words[0], words[1], words[2], words[3]};
}
template <typename Element>
__device__ void store_sum(const SumTarget& target, std::uint32_t vector,
                          const float (&sum)[Element::kOfVector]) {
  const uint4 rounded = round_vector<Element>(sum);
  if (target.aligned) {
    __stcs(reinterpret_cast<uint4*>(target.out) + vector, rounded);
  } else {
    store_odd<Element>(target.out, vector, rounded, target.row_bytes);
  }
}

template <typename Element, bool kWeighted>
__device__ void add_vector(float (&sum)[Element::kOfVector], const uint4& packed, float weight) {
  float values[Element::kOfVector];
  Element::widen(packed, values);
#pragma unroll
  for (int i = 0; i < Element::kOfVector; ++i) {
    sum[i] = kWeighted ? __fmaf_rn(weight, values[i], sum[i]) : __fadd_rn(sum[i], values[i]);
  }
}

// Vectors [begin, begin + 32 * kVectors) of exactly kRows plain terms, without a branch.
template <typename Element, int kRows, int kVectors>
__device__ void sum_exact_vectors(const uint4* const (&rows)[kRows], uint4* out,
                                  std::uint32_t vector) {
  uint4 loaded[kVectors][kRows];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) loaded[v][i] = __ldcs(rows[i] + vector + v * kWarpLanes);
  }
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    float sum[Element::kOfVector] = {};
#pragma unroll
    for (int i = 0; i < kRows; ++i) add_vector<Element, false>(sum, loaded[v][i], 1.0F);
    __stcs(out + vector + v * kWarpLanes, round_vector<Element>(sum));
  }
}

// Exactly kRows plain terms to an aligned row, as many vectors of each in flight as kLoads loads
// allow: few SMs need all the bytes in flight that their registers can hold.
template <typename Element, int kRows, int kLoads>
__device__ void sum_exact_rows(const WarpTerms& terms, const SumTarget& target, int lane) {
  constexpr int kMost = kLoads / kRows;
  constexpr int kVectors = kMost < 1 ? 1 : (kMost > 4 ? 4 : kMost);
  constexpr std::uint32_t kStep = kWarpLanes * kVectors;
  const uint4* rows[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) rows[i] = reinterpret_cast<const uint4*>(terms[i].row);
  auto* out = reinterpret_cast<uint4*>(target.out);
  std::uint32_t vector = target.first + static_cast<std::uint32_t>(lane);
  const std::uint32_t whole = target.first + (target.end - target.first) / kStep * kStep;
#pragma unroll 1
  for (; vector < whole; vector += kStep) {
    sum_exact_vectors<Element, kRows, kVectors>(rows, out, vector);
  }
  if constexpr (kVectors == 1) {
    if (vector < target.end) sum_exact_vectors<Element, kRows, 1>(rows, out, vector);
  } else {
#pragma unroll 1
    for (; vector < target.end; vector += kWarpLanes) {
      sum_exact_vectors<Element, kRows, 1>(rows, out, vector);
    }
  }
}

// Any number of terms, kRows rows in flight. Additions stop behind the last term: to test for each of the kRows cost
// 5 % (2 ranks x 8 SMs, grouped, on one GPU: 1290 us, not 1225).
template <typename Element, Arithmetic kArithmetic, int kRows, bool kAddend>
__device__ void sum_any_rows(const WarpTerms& terms, int count, const SumTarget& target, int lane) {
#pragma unroll 1
  for (std::uint32_t vector = target.first + static_cast<std::uint32_t>(lane); vector < target.end;
       vector += kWarpLanes) {
    float total[Element::kOfVector] = {};
    [[maybe_unused]] float partial[Element::kOfVector] = {};
    for (int base = 0; base < count; base += kRows) {
      uint4 loaded[kRows];
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        if (base + i < count) {
          loaded[i] = __ldcs(reinterpret_cast<const uint4*>(terms[base + i].row) + vector);
        }
      }
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        if (base + i >= count) break;
        if constexpr (kArithmetic == Arithmetic::ranked) {
          if (terms[base + i].of_rank == OfRank::whole) {
            add_vector<Element, false>(total, loaded[i], 1.0F);
            continue;
          }
          add_vector<Element, true>(partial, loaded[i], terms[base + i].weight);
          if (terms[base + i].of_rank == OfRank::some) continue;
          add_vector<Element, false>(total, round_vector<Element>(partial), 1.0F);
#pragma unroll
          for (float& element : partial) element = 0.0F;
        } else {
          add_vector<Element, kArithmetic == Arithmetic::weighted>(total, loaded[i],
                                                                   terms[base + i].weight);
        }
      }
    }
    if constexpr (kAddend) {
      add_vector<Element, false>(total, load_odd<Element>(target.addend, vector, target.row_bytes),
                                 1.0F);
    }
    store_sum<Element>(target, vector, total);
  }
}

// One warp: the sum of `count` terms, in the order of the list. kExact: without branches, for which
// 16 loads a lane need 128 registers (with 64 they spill, and 8 ranks x 16 SMs take 858 us, not 752).
// kAddend: a kernel of its own, for the same reason (757 -> 822 us where all had the code for it).
template <typename Element, Arithmetic kArithmetic, bool kExact, bool kAddend>
__device__ void sum_rows(const WarpTerms& terms, int count, const SumTarget& target, int lane) {
  constexpr int kLoads = 16;
  constexpr int kRows = kArithmetic == Arithmetic::ranked ? 6 : 8;
  if constexpr (kExact) {
    static_assert(kArithmetic == Arithmetic::plain && !kAddend);
    switch (target.aligned ? count : 0) {
      case 1: return sum_exact_rows<Element, 1, kLoads>(terms, target, lane);
      case 2: return sum_exact_rows<Element, 2, kLoads>(terms, target, lane);
      case 3: return sum_exact_rows<Element, 3, kLoads>(terms, target, lane);
      case 4: return sum_exact_rows<Element, 4, kLoads>(terms, target, lane);
      case 5: return sum_exact_rows<Element, 5, kLoads>(terms, target, lane);
      case 6: return sum_exact_rows<Element, 6, kLoads>(terms, target, lane);
      case 7: return sum_exact_rows<Element, 7, kLoads>(terms, target, lane);
      case 8: return sum_exact_rows<Element, 8, kLoads>(terms, target, lane);
      default: break;
    }
  }
  sum_any_rows<Element, kArithmetic, kRows, kAddend>(terms, count, target, lane);
}

}  // namespace wherry::kernels::cuda
