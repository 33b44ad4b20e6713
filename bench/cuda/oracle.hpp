// What a timed step must bring, by plain loops that share nothing with the library: the payload of every
// row, where it comes from, and the sums. Host and device: the shapes would take the host too long.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <optional>
#include <random>
#include <vector>

#include "kernels/layout.hpp"
#include "wherry/exchange.hpp"
#include "wherry/types.hpp"

namespace wherry::bench {

struct GpuShape {
  int ranks = 8;
  int tokens = 64;  // of each rank
  int hidden = 512;
  int topk = 8;
  int experts = 64;
  Layout layout = Layout::tokens;
  Reduction reduction = Reduction::by_rank;
  std::optional<SumAt> sum_at = SumAt::home;  // as ExchangeConfig::sum_at
  int depth = 2;
  DType dtype = DType::bf16;  // or f16, f32
  bool e4m3 = false;          // dispatch quantised rows, of bf16
  const char* kernels = "";   // as ExchangeConfig::kernels
  int num_sms = 4;            // of a rank, or 0: the exchange's choice
  double deadline = 20.0;     // seconds, of every wait for another rank

  std::uint64_t x_bytes() const {
    return static_cast<std::uint64_t>(hidden) * static_cast<std::uint64_t>(dtype_bytes(dtype));
  }
  std::uint64_t row_bytes() const { return e4m3 ? static_cast<std::uint64_t>(hidden) : x_bytes(); }
  std::uint64_t scale_bytes() const {
    return e4m3 ? static_cast<std::uint64_t>((hidden + 127) / 128 * 4) : 0;
  }
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
// Who it is: f(source rank, token, column). Any sign and mantissa, magnitudes 2^-3 .. 2.
WHERRY_HD inline std::uint32_t payload(DType dtype, int source, int token, int column) {
  const Fields fields = fields_of(dtype);
  const std::uint32_t bits =
      mix(static_cast<std::uint32_t>(column) * 0x9E3779B9U +
          mix(static_cast<std::uint32_t>(token) * 1024U + static_cast<std::uint32_t>(source)));
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

// --- Routing ------------------------------------------------------------------------------------

struct Origin {  // of a received row; source -1: room that nothing fills
  std::int32_t source = -1;
  std::int32_t token = -1;
  std::int32_t expert = -1;  // whose bits are flipped; for token rows: experts + rank
};

struct Choices {  // of one rank, [tokens, topk]
  std::vector<std::int32_t> ids;
  std::vector<float> weights;
};

// Contiguous; the first ranks hold one more.
inline int first_expert_of(const GpuShape& shape, int rank) {
  const int each = shape.experts / shape.ranks;
  const int more = shape.experts % shape.ranks;
  return rank * each + (rank < more ? rank : more);
}
inline int rank_of_expert(const GpuShape& shape, int expert) {
  int rank = 0;
  while (expert >= first_expert_of(shape, rank + 1)) ++rank;
  return rank;
}

inline Choices draw_choices(const GpuShape& shape, int rank) {
  Choices choices;
  std::mt19937 random(static_cast<unsigned>(rank + 1));
  for (int token = 0; token < shape.tokens; ++token) {
    const std::size_t first = choices.ids.size();
    for (int k = 0; k < shape.topk; ++k) {
      int id = 0;
      bool taken = true;
      while (taken) {
        id = static_cast<int>(random() % static_cast<unsigned>(shape.experts));
        taken = false;
        for (int j = 0; j < k; ++j) taken |= choices.ids[first + static_cast<std::size_t>(j)] == id;
      }
      choices.ids.push_back(id);
      choices.weights.push_back(static_cast<float>(random() % 1000 + 1) / 1024.0F);
    }
  }
  return choices;
}

// Where the rows that `rank` receives come from, in their order: by slot (tokens: all together), source
// rank, token. With `slots` each slot has room for all tokens.
inline std::vector<Origin> origins_of(const GpuShape& shape, int rank) {
  const int first = first_expert_of(shape, rank);
  const int end = first_expert_of(shape, rank + 1);
  const bool by_token = shape.layout == Layout::tokens;
  std::vector<std::vector<Origin>> runs(by_token ? 1 : static_cast<std::size_t>(end - first));
  for (int source = 0; source < shape.ranks; ++source) {
    const Choices choices = draw_choices(shape, source);
    for (int token = 0; token < shape.tokens; ++token) {
      bool here = false;
      for (int k = 0; k < shape.topk; ++k) {
        const int at = token * shape.topk + k;
        const int id = choices.ids[static_cast<std::size_t>(at)];
        if (id < first || id >= end) continue;
        here = true;
        if (!by_token) runs[static_cast<std::size_t>(id - first)].push_back({source, token, id});
      }
      if (by_token && here) runs[0].push_back({source, token, shape.experts + rank});
    }
  }
  std::vector<Origin> origins;
  for (std::vector<Origin>& run : runs) {
    if (shape.layout == Layout::slots) {
      run.resize(static_cast<std::size_t>(shape.tokens) * static_cast<std::size_t>(shape.ranks));
    }
    origins.insert(origins.end(), run.begin(), run.end());
  }
  return origins;
}

// --- Sums ---------------------------------------------------------------------------------------

struct SumRule {
  Layout layout;
  Reduction reduction;
  DType dtype;
  int ranks, topk, experts;
};
// One element of the combined output. dest, ids, weights: the token's choices.
WHERRY_HD inline std::uint32_t expected_sum(const SumRule& rule, int source, int token, int column,
                                            const std::int32_t* dest, const std::int32_t* ids,
                                            const float* weights) {
  const std::uint32_t x = payload(rule.dtype, source, token, column);
  const auto of_expert = [&](int expert) {
    return widen(rule.dtype, x ^ expert_bits(rule.dtype, expert));
  };
  float sum = 0.0F;
  if (rule.reduction == Reduction::by_token) {
    for (int k = 0; k < rule.topk; ++k) {
      if (dest[k] >= 0) sum = fmaf(weights[k], of_expert(ids[k]), sum);
    }
    return narrow(rule.dtype, sum);
  }
  for (int rank = 0; rank < rule.ranks; ++rank) {
    float partial = 0.0F;
    bool any = false;
    for (int k = 0; k < rule.topk; ++k) {
      if (dest[k] != rank) continue;
      any = true;
      partial = fmaf(weights[k], of_expert(ids[k]), partial);
    }
    if (!any) continue;
    sum += rule.layout == Layout::tokens ? of_expert(rule.experts + rank)
                                         : widen(rule.dtype, narrow(rule.dtype, partial));
  }
  return narrow(rule.dtype, sum);
}

}  // namespace wherry::bench
