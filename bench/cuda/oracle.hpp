// What the kernels must produce, by plain loops that share nothing with them but layout.hpp: the
// payload of every row, the plan, and the sums. Host and device; the device only uses it to check
// shapes that would take the host too long.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "kernels/layout.hpp"
#include "wherry/types.hpp"

namespace wherry::bench {

enum class Layout { tokens, grouped, slots };
enum class Reduction { by_token, by_rank };

struct Shape {
  int ranks = 8;
  int tokens = 64;  // of each rank at most; `uneven` gives ranks different numbers
  int hidden = 512;
  int topk = 8;
  int experts = 64;
  Layout layout = Layout::tokens;
  Reduction reduction = Reduction::by_rank;
  int depth = 2;
  int alignment = 1;
  DType dtype = DType::bf16;  // or f16, f32
  bool e4m3 = false;          // dispatch quantised rows, of bf16
  bool partials = false;  // grouped by_rank: sums travel as partials instead of being made at home
  bool fill = false;      // grouped: further slots are filled on arrival (Rows::first_slot)
  bool bulk = true;       // bulk copies where legal, else ordinary ones
  bool uneven = false;
  bool duplicates = false;  // some tokens name one expert twice
  double absent = 0.0;      // share of choices that are -1
  int blocks = 4;           // per rank
  int sets = 3;             // routings and payloads that take turns

  int tokens_of(int rank) const {
    if (!uneven) return tokens;
    return rank % 3 == 1 ? 0 : tokens - 7 * (rank % 4);
  }
  std::uint64_t x_bytes() const {
    return static_cast<std::uint64_t>(hidden) * static_cast<std::uint64_t>(dtype_bytes(dtype));
  }
  std::uint64_t row_bytes() const { return e4m3 ? static_cast<std::uint64_t>(hidden) : x_bytes(); }
  std::uint64_t scale_bytes() const {
    return e4m3 ? static_cast<std::uint64_t>((hidden + 127) / 128 * 4) : 0;
  }
  std::uint64_t scale_pitch() const { return (scale_bytes() + 15) / 16 * 16; }
};

// --- Payload ------------------------------------------------------------------------------------

WHERRY_HD inline std::uint32_t mix(std::uint32_t value) {
  value ^= value >> 16;
  value *= 0x7FEB352DU;
  value ^= value >> 15;
  value *= 0x846CA68BU;
  return value ^ (value >> 16);
}
// Fields of an element of each type.
struct Fields {
  int mantissa_bits;
  std::uint32_t eighth;  // exponent of 2^-3
  int sign_bit;
};
WHERRY_HD inline Fields fields_of(DType dtype) {
  if (dtype == DType::f16) return {10, 12, 15};
  return dtype == DType::f32 ? Fields{23, 124, 31} : Fields{7, 124, 15};
}
// Who it is: f(set, source rank, token, column). Any sign and mantissa, magnitudes 2^-3 .. 2.
WHERRY_HD inline std::uint32_t payload(DType dtype, int set, int source, int token, int column) {
  const Fields fields = fields_of(dtype);
  const std::uint32_t bits =
      mix(static_cast<std::uint32_t>(column) * 0x9E3779B9U +
          mix(static_cast<std::uint32_t>(token) * 64U + static_cast<std::uint32_t>(source) +
              static_cast<std::uint32_t>(set) * 0x1000003U));
  const std::uint32_t exponent = fields.eighth + ((bits >> 24) & 3U);
  const std::uint32_t mantissa = bits & ((1U << fields.mantissa_bits) - 1U);
  return (bits >> 31 << fields.sign_bit) | (exponent << fields.mantissa_bits) | mantissa;
}
// Experts differ from each other: each flips its own bits of the mantissa and the sign.
WHERRY_HD inline std::uint32_t expert_bits(DType dtype, int expert) {
  const Fields fields = fields_of(dtype);
  const std::uint32_t bits = mix(static_cast<std::uint32_t>(expert) + 17U);
  return (bits & ((1U << fields.mantissa_bits) - 1U)) | (bits >> 31 << fields.sign_bit);
}

WHERRY_HD inline float widen(DType dtype, std::uint32_t bits) {
  if (dtype == DType::f16) {
    const auto mantissa = static_cast<float>(bits & 0x3FFU);
    const int exponent = static_cast<int>(bits >> 10 & 0x1FU);
    const float magnitude =
        exponent == 0 ? ldexpf(mantissa, -24) : ldexpf(1024.0F + mantissa, exponent - 25);
    return (bits & 0x8000U) != 0 ? -magnitude : magnitude;
  }
  const std::uint32_t wide = dtype == DType::f32 ? bits : bits << 16;
  float value;
  memcpy(&value, &wide, sizeof(value));
  return value;
}
WHERRY_HD inline std::uint32_t narrow(DType dtype,
                                      float value) {  // nearest even; no NaN comes here
  std::uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  if (dtype == DType::f32) return bits;
  if (dtype != DType::f16) return (bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16;
  const std::uint32_t sign = bits >> 16 & 0x8000U;
  const float magnitude = fabsf(value);
  int exponent = magnitude > 0.0F ? ilogbf(magnitude) : -14;
  if (exponent < -14) exponent = -14;
  // Adding lets a carry go into the exponent, a subnormal become normal and the largest infinite.
  const auto units = static_cast<std::uint32_t>(rintf(ldexpf(magnitude, 10 - exponent)));
  return sign | (units + (static_cast<std::uint32_t>(exponent + 14) << 10));
}
WHERRY_HD inline std::uint32_t load_bits(DType dtype, const void* row, std::size_t column) {
  return dtype == DType::f32 ? static_cast<const std::uint32_t*>(row)[column]
                             : static_cast<const std::uint16_t*>(row)[column];
}
WHERRY_HD inline void store_bits(DType dtype, void* row, std::size_t column, std::uint32_t bits) {
  if (dtype == DType::f32) {
    static_cast<std::uint32_t*>(row)[column] = bits;
  } else {
    static_cast<std::uint16_t*>(row)[column] = static_cast<std::uint16_t>(bits);
  }
}

// e4m3: four bits of exponent with bias 7, three of mantissa, no infinity, largest 448.
WHERRY_HD inline std::uint8_t to_e4m3(float value) {
  const std::uint8_t sign = value < 0.0F ? 0x80 : 0;
  const float magnitude = fabsf(value);
  if (magnitude >= 448.0F) return static_cast<std::uint8_t>(sign | 0x7E);
  int exponent = magnitude > 0.0F ? ilogbf(magnitude) : -6;
  if (exponent < -6) exponent = -6;
  int eighths = static_cast<int>(rintf(ldexpf(magnitude, 3 - exponent)));
  if (eighths == 16) {
    eighths = 8;
    ++exponent;
  }
  const int code = eighths < 8 ? eighths : ((exponent + 7) << 3) | (eighths - 8);
  return static_cast<std::uint8_t>(sign | code);
}

// --- Plan ---------------------------------------------------------------------------------------

struct Origin {  // of a received row; source -1: padding
  std::int32_t source = -1;
  std::int32_t token = -1;
  std::int32_t expert = -1;  // whose bits are flipped; for token rows: experts + rank
};

struct RankPlan {
  std::vector<std::int32_t> ids;  // [tokens, topk]
  std::vector<float> weights;
  std::vector<std::int32_t> dest, slot, row, token_row;
  std::vector<std::uint8_t> repeat;
  std::vector<std::int32_t> slot_counts, slot_begin, token_rows_from, token_rows_to;
  std::vector<Origin> rows;  // grouped or slots rows of this rank
  std::vector<Origin> token_rows;
  std::vector<layout::TokenEntry> entries;  // [token_rows, topk]
};

inline int first_slot_of(const Shape& shape, int rank) {  // contiguous, the first ranks hold more
  const int each = shape.experts / shape.ranks;
  const int more = shape.experts % shape.ranks;
  return rank * each + (rank < more ? rank : more);
}
inline int rank_of_slot(const Shape& shape, int slot) {
  int rank = 0;
  while (slot >= first_slot_of(shape, rank + 1)) ++rank;
  return rank;
}
inline int max_local_slots(const Shape& shape) {
  return (shape.experts + shape.ranks - 1) / shape.ranks;
}
inline int rows_per_slot(const Shape& shape) {
  return shape.layout == Layout::slots ? shape.tokens * shape.ranks : 0;
}

inline void draw_routing(const Shape& shape, int set, int rank, RankPlan& plan) {
  std::mt19937 random(static_cast<unsigned>(set * 1000 + rank + 1));
  const int tokens = shape.tokens_of(rank);
  for (int token = 0; token < tokens; ++token) {
    const std::size_t first = plan.ids.size();
    for (int k = 0; k < shape.topk; ++k) {
      int id = 0;
      bool taken = true;
      while (taken) {
        id = static_cast<int>(random() % static_cast<unsigned>(shape.experts));
        taken = false;
        for (int j = 0; j < k; ++j) taken |= plan.ids[first + static_cast<std::size_t>(j)] == id;
      }
      plan.ids.push_back(id);
      plan.weights.push_back(static_cast<float>(random() % 1000 + 1) / 1024.0F);
    }
    for (int k = 0; k < shape.topk; ++k) {
      const auto at = first + static_cast<std::size_t>(k);
      if (shape.duplicates && k > 0 && random() % 4 == 0) plan.ids[at] = plan.ids[at - 1];
      if (static_cast<double>(random() % 1000) < shape.absent * 1000.0) plan.ids[at] = -1;
    }
  }
}

// The plans of all ranks for one set.
inline std::vector<RankPlan> make_plans(const Shape& shape, int set) {
  const auto ranks = static_cast<std::size_t>(shape.ranks);
  const auto topk = static_cast<std::size_t>(shape.topk);
  std::vector<RankPlan> plans(ranks);
  std::vector<std::int32_t> counts(static_cast<std::size_t>(shape.experts), 0);
  for (std::size_t r = 0; r < ranks; ++r) {
    RankPlan& p = plans[r];
    draw_routing(shape, set, static_cast<int>(r), p);
    p.dest.assign(p.ids.size(), -1);
    p.slot = p.row = p.token_row = p.dest;
    p.repeat.assign(p.ids.size(), 0);
    p.token_rows_from.assign(ranks, 0);
    p.token_rows_to.assign(ranks, 0);
    for (std::size_t at = 0; at < p.ids.size(); ++at) {
      if (p.ids[at] < 0) continue;
      p.slot[at] = p.ids[at];
      p.dest[at] = rank_of_slot(shape, p.slot[at]);
      for (std::size_t before = at / topk * topk; before < at; ++before) {
        if (p.slot[before] == p.slot[at]) p.repeat[at] = 1;
      }
      if (p.repeat[at] == 0) ++counts[static_cast<std::size_t>(p.slot[at])];
    }
  }
  std::vector<std::int32_t> next(counts.size(), 0);  // free row of each slot
  for (std::size_t r = 0; r < ranks; ++r) {
    RankPlan& p = plans[r];
    std::int32_t begin = 0;
    for (int slot = first_slot_of(shape, static_cast<int>(r));
         slot < first_slot_of(shape, static_cast<int>(r) + 1); ++slot) {
      const std::int32_t count = counts[static_cast<std::size_t>(slot)];
      p.slot_counts.push_back(count);
      p.slot_begin.push_back(begin);
      next[static_cast<std::size_t>(slot)] = begin;
      begin += shape.layout == Layout::slots
                   ? rows_per_slot(shape)
                   : (count + shape.alignment - 1) / shape.alignment * shape.alignment;
    }
    p.slot_begin.push_back(begin);
    p.rows.resize(static_cast<std::size_t>(begin));
  }
  for (std::size_t r = 0; r < ranks; ++r) {
    RankPlan& p = plans[r];
    const auto source = static_cast<std::int32_t>(r);
    for (std::size_t at = 0; at < p.ids.size(); ++at) {
      if (p.dest[at] < 0) continue;
      const auto token = static_cast<std::int32_t>(at / topk);
      const auto d = static_cast<std::size_t>(p.dest[at]);
      RankPlan& to = plans[d];
      for (std::size_t before = at / topk * topk; before < at; ++before) {
        if (p.slot[before] == p.slot[at]) p.row[at] = p.row[before];
        if (p.dest[before] == p.dest[at]) p.token_row[at] = p.token_row[before];
      }
      if (p.row[at] < 0) {
        p.row[at] = next[static_cast<std::size_t>(p.slot[at])]++;
        to.rows[static_cast<std::size_t>(p.row[at])] = {source, token, p.slot[at]};
      }
      if (p.token_row[at] < 0) {
        p.token_row[at] = static_cast<std::int32_t>(to.token_rows.size());
        to.token_rows.push_back({source, token, shape.experts + p.dest[at]});
        ++p.token_rows_to[d];
        ++to.token_rows_from[r];
      }
    }
  }
  for (std::size_t d = 0; d < ranks; ++d) {
    for (const Origin& origin : plans[d].token_rows) {
      const RankPlan& home = plans[static_cast<std::size_t>(origin.source)];
      for (std::size_t k = 0; k < topk; ++k) {
        const std::size_t at = static_cast<std::size_t>(origin.token) * topk + k;
        const bool here = home.dest[at] == static_cast<std::int32_t>(d);
        plans[d].entries.push_back({here ? home.row[at] : -1, home.weights[at]});
      }
    }
  }
  return plans;
}

// --- Sums ---------------------------------------------------------------------------------------

struct SumRule {
  Layout layout;
  Reduction reduction;
  DType dtype;
  int ranks, topk, experts, set;
};
// One element of the combined output. dest, slot, weights: the token's choices.
WHERRY_HD inline std::uint32_t expected_sum(const SumRule& rule, int source, int token, int column,
                                            const std::int32_t* dest, const std::int32_t* slot,
                                            const float* weights) {
  const std::uint32_t x = payload(rule.dtype, rule.set, source, token, column);
  const auto of_expert = [&](int expert) {
    return widen(rule.dtype, x ^ expert_bits(rule.dtype, expert));
  };
  float sum = 0.0F;
  if (rule.reduction == Reduction::by_token) {
    for (int k = 0; k < rule.topk; ++k) {
      if (dest[k] >= 0) sum = fmaf(weights[k], of_expert(slot[k]), sum);
    }
    return narrow(rule.dtype, sum);
  }
  for (int rank = 0; rank < rule.ranks; ++rank) {
    float partial = 0.0F;
    bool any = false;
    for (int k = 0; k < rule.topk; ++k) {
      if (dest[k] != rank) continue;
      any = true;
      partial = fmaf(weights[k], of_expert(slot[k]), partial);
    }
    if (!any) continue;
    sum += rule.layout == Layout::tokens ? of_expert(rule.experts + rank)
                                         : widen(rule.dtype, narrow(rule.dtype, partial));
  }
  return narrow(rule.dtype, sum);
}

}  // namespace wherry::bench
