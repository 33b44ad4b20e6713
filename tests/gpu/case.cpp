// What the cases of twin.hpp are made of: names, rows, routings.
#include <fmt/format.h>

#include <cstring>
#include <limits>

#include "gpu/twin.hpp"
#include "support/layer.hpp"

namespace wherry::test {

namespace {

std::size_t size(std::int64_t value) { return static_cast<std::size_t>(value); }

std::uint64_t mix(std::uint64_t value) {
  value = (value ^ (value >> 31)) * 0x9E3779B97F4A7C15ULL;
  value = (value ^ (value >> 29)) * 0xBF58476D1CE4E5B9ULL;
  return value ^ (value >> 32);
}

// Rows that formats of few bits must get right: zeros, subnormals, the largest values, one infinity among
// numbers, magnitudes that differ from block to block. Of six rows one has everything that numbers are not
// made of, and one numbers alone: a NaN takes whole rows of some formats.
double extreme(double value, std::int64_t token, std::int64_t i, DType dtype) {
  switch (token % 6) {
    case 2: return i % 2 == 0 ? 0.0 : -0.0;
    case 3: return value * (dtype == DType::f16 ? 3e-8 : 1e-39);
    case 4: return value * (dtype == DType::f16 ? 8000.0 : 4e37);
    case 5: return i == 1 ? std::numeric_limits<double>::infinity() : value;
    case 1: return value * (i / 16 % 3 == 0 ? 1e-3 : 1.0);
    default: return value;
  }
}

}  // namespace

double load(DType dtype, const std::byte* at) {
  switch (dtype) {
    case DType::bf16: {
      Bf16 value;
      std::memcpy(&value, at, sizeof(value));
      return static_cast<double>(widen(value));
    }
    case DType::f16: {
      _Float16 value;
      std::memcpy(&value, at, sizeof(value));
      return static_cast<double>(value);
    }
    case DType::f32: {
      float value;
      std::memcpy(&value, at, sizeof(value));
      return static_cast<double>(value);
    }
    case DType::f64: {
      double value;
      std::memcpy(&value, at, sizeof(value));
      return value;
    }
    case DType::raw: break;
  }
  return static_cast<double>(std::to_integer<int>(*at));
}
void store(DType dtype, std::byte* at, double value) {
  switch (dtype) {
    case DType::bf16: {
      const Bf16 bits = narrow(static_cast<float>(value));
      std::memcpy(at, &bits, sizeof(bits));
      return;
    }
    case DType::f16: {
      const auto half = static_cast<_Float16>(value);
      std::memcpy(at, &half, sizeof(half));
      return;
    }
    case DType::f32: {
      const auto single = static_cast<float>(value);
      std::memcpy(at, &single, sizeof(single));
      return;
    }
    case DType::f64: std::memcpy(at, &value, sizeof(value)); return;
    case DType::raw: break;
  }
  *at = static_cast<std::byte>(static_cast<int>(value) & 0xFF);
}

WireFormat way_out(const ExchangeConfig& c) {
  return wire_format(c.dispatch_wire, c.dtype, c.hidden, c.scale_layout);
}
bool keeps_results(const ExchangeConfig& c) {
  return wire_format(c.combine_wire, c.dtype, c.hidden).keeps_dtype() ||
         (c.effective_reduction() == Reduction::by_rank && c.layout != Layout::tokens);
}
bool converts(const ExchangeConfig& c) {
  return !way_out(c).keeps_dtype() || !wire_format(c.combine_wire, c.dtype, c.hidden).keeps_dtype();
}

std::string Case::name() const {
  std::string text = fmt::format(
      "{} {} {} {} experts {} topk {} hidden {} depth {}", wherry::name(config.layout),
      wherry::name(config.effective_reduction()), wherry::name(config.effective_sum_at()),
      wherry::name(config.dtype), config.experts, config.topk, config.hidden, config.depth);
  if (!config.kernels.empty()) text += " " + config.kernels;
  if (config.dispatch_wire != Wire::same)
    text += fmt::format(" {} {} scales", wherry::name(config.dispatch_wire),
                        wherry::name(config.scale_layout));
  if (config.combine_wire != Wire::same)
    text += fmt::format(" home as {}", wherry::name(config.combine_wire));
  if (skewed != 0) text += fmt::format(" skewed {}", skewed);
  if (config.alignment > 1) text += fmt::format(" alignment {}", config.alignment);
  if (config.weights == Weights::caller) text += " caller";
  if (config.placement.has_value()) text += " placement";
  if (config.expert_ids == ExpertIds::physical) text += " physical";
  for (const auto& [flag, what] : {std::pair{duplicates, " duplicates"},
                                   {wide_ids, " int64"},
                                   {halves, " halves"},
                                   {fused, " fused"},
                                   {own_results, " own_results"},
                                   {own_rows, " own_rows"},
                                   {converted, " converted"},
                                   {no_weights, " no_weights"},
                                   {scalars, " scalars"},
                                   {addend, " addend"},
                                   {config.overflow == Overflow::drop, " drop"}}) {
    if (flag) text += what;
  }
  return text;
}

ExchangeConfig config_of(const Batch& batch, Layout layout, Reduction reduction, DType dtype) {
  ExchangeConfig config = config_for(batch, dtype);
  config.layout = layout;
  config.reduction = reduction;
  config.deadline = Seconds(20.0);
  return config;
}

StepInput input_of(const Case& test, int rank, int step) {
  const Batch& batch = test.batch;
  StepInput input;
  input.tokens = batch.tokens_of(rank);
  const Routing routing = batch.routing_of(rank);
  const int ids = test.config.expert_ids == ExpertIds::physical && test.config.placement.has_value()
                      ? test.config.placement->num_slots()
                      : batch.experts;
  for (std::int64_t token = 0; token < input.tokens; ++token) {
    for (int k = 0; k < batch.topk; ++k) {
      const auto drawn = static_cast<std::int32_t>(routing.id(token, k));
      std::int32_t id = drawn < 0 ? -1 : (drawn + step * (1 + k % 2)) % ids;
      if (test.duplicates && k > 0 && (token + k) % 3 == 0) id = input.ids[input.ids.size() - 1];
      input.ids.push_back(id);
      input.weights.push_back(routing.weight(token, k) + 0.125F * static_cast<float>(step));
    }
  }
  const DType dtype = test.config.dtype;
  const std::int64_t hidden = test.config.hidden;
  input.x.resize(size(input.tokens * hidden * dtype_bytes(dtype)));
  for (std::int64_t token = 0; token < input.tokens; ++token) {
    for (std::int64_t i = 0; i < hidden; ++i) {
      const std::uint64_t draw =
          mix(static_cast<std::uint64_t>(((step * 64 + rank) * 4096 + token) * 131072 + i));
      double value = static_cast<double>(draw >> 40) / static_cast<double>(1 << 20) - 8.0;
      // Now and then what numbers are not made of.
      if (converts(test.config)) value = extreme(value, token, i, dtype);
      if (converts(test.config) && token % 6 != 0) {
        store(dtype, input.x.data() + (token * hidden + i) * dtype_bytes(dtype), value);
        continue;
      }
      if (draw % 509 == 0) value = std::numeric_limits<double>::infinity();
      if (draw % 509 == 1) value = -0.0;
      if (draw % 509 == 2) value = 1e-41;
      if (draw % 509 == 3) value = std::numeric_limits<double>::quiet_NaN();
      store(dtype, input.x.data() + (token * hidden + i) * dtype_bytes(dtype), value);
    }
  }
  return input;
}

}  // namespace wherry::test
