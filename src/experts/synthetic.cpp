#include "experts/synthetic.hpp"

#include "kernels/numerics.hpp"
#include "support/check.hpp"

namespace wherry {
namespace {

// splitmix64's finaliser: one key per row, so its cost does not matter.
std::uint64_t mix(std::uint64_t value) {
  value += 0x9E3779B97F4A7C15U;
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9U;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EBU;
  return value ^ (value >> 31);
}

std::uint64_t row_key(std::uint64_t seed, std::uint64_t kind, std::uint64_t a, std::uint64_t b) {
  return mix(mix(mix(mix(seed) ^ kind) ^ a) ^ b);
}

// Draws of one row: an odd integer in [-255, 255] for each column. The column is a 32-bit counter
// mixed with both halves of the key, one before and one between the multiplications, so that no two
// rows are shifts of each other. 32-bit operations only: every compiler vectorises the loop.
std::int32_t draw(std::uint32_t column, std::uint32_t key_low, std::uint32_t key_high) {
  std::uint32_t bits = column * 0x9E3779B9U + key_low;
  bits ^= bits >> 16;
  bits *= 0x7FEB352DU;
  bits ^= (bits >> 15) ^ key_high;
  bits *= 0x846CA68BU;
  return static_cast<std::int32_t>((bits >> 24) * 2U) - 255;
}

// float_to_bf16() of a value that bf16 holds exactly.
std::uint16_t exact_bf16(float value) {
  return static_cast<std::uint16_t>(float_bits(value) >> 16);
}

void fill(std::uint64_t key, float unit, std::span<float> out) {
  const auto low = static_cast<std::uint32_t>(key);
  const auto high = static_cast<std::uint32_t>(key >> 32);
  const auto columns = static_cast<std::uint32_t>(out.size());
  float* const data = out.data();
  for (std::uint32_t column = 0; column < columns; ++column) {
    data[column] = static_cast<float>(draw(column, low, high)) * unit;
  }
}

void fill(std::uint64_t key, float unit, std::span<std::uint16_t> out) {
  const auto low = static_cast<std::uint32_t>(key);
  const auto high = static_cast<std::uint32_t>(key >> 32);
  const auto columns = static_cast<std::uint32_t>(out.size());
  std::uint16_t* const data = out.data();
  for (std::uint32_t column = 0; column < columns; ++column) {
    data[column] = exact_bf16(static_cast<float>(draw(column, low, high)) * unit);
  }
}

template <typename Fill>
void fill_view(TensorView view, const Fill& fill_one) {
  WHERRY_CHECK_ARGUMENT(view.dtype == DType::bf16 || view.dtype == DType::f32, Stage::experts,
                        "synthetic data is bf16 or f32, not {}", name(view.dtype));
  const auto cols = static_cast<std::size_t>(view.cols);
  for (std::int64_t row = 0; row < view.rows; ++row) {
    if (view.dtype == DType::bf16) {
      fill_one(row, std::span(view.row<std::uint16_t>(row), cols));
    } else {
      fill_one(row, std::span(view.row<float>(row), cols));
    }
  }
}

// The power of two nearest to sqrt(3 / fan_in) on a logarithmic scale, over 256, so that the
// largest draw, 255, becomes about sqrt(3 / fan_in): a uniform variable of variance 1 / fan_in.
float weight_unit(std::int64_t fan_in) {
  float unit = 1.0F / 256;
  for (std::int64_t power = 6; power < fan_in; power *= 4) unit *= 0.5F;
  return unit;
}

enum Kind : std::uint8_t { kWeights, kTokens };

}  // namespace

std::int64_t SyntheticExperts::rows(Matrix matrix) const noexcept {
  return matrix == Matrix::down ? hidden : expert_hidden;
}

std::int64_t SyntheticExperts::cols(Matrix matrix) const noexcept {
  return matrix == Matrix::down ? expert_hidden : hidden;
}

float SyntheticExperts::bound(Matrix matrix) const noexcept {
  return 255 * weight_unit(cols(matrix));
}

namespace {

template <typename T>
void fill_weights(const SyntheticExperts& experts, int expert, Matrix matrix, std::int64_t row,
                  std::span<T> out) {
  const auto place = static_cast<std::uint64_t>(expert) * 3 + static_cast<std::uint64_t>(matrix);
  fill(row_key(experts.seed, kWeights, place, static_cast<std::uint64_t>(row)),
       weight_unit(experts.cols(matrix)), out);
}

}  // namespace

void SyntheticExperts::fill_row(int expert, Matrix matrix, std::int64_t row,
                                std::span<float> out) const {
  fill_weights(*this, expert, matrix, row, out);
}

void SyntheticExperts::fill_row(int expert, Matrix matrix, std::int64_t row,
                                std::span<std::uint16_t> out) const {
  fill_weights(*this, expert, matrix, row, out);
}

WeightSource SyntheticExperts::source() const {
  return [experts = *this](int expert, Matrix matrix, TensorView weights) {
    fill_view(weights,
              [&](std::int64_t row, auto out) { experts.fill_row(expert, matrix, row, out); });
  };
}

void fill_synthetic_tokens(std::uint64_t seed, std::int64_t first_token, TensorView x) {
  fill_view(x, [&](std::int64_t row, auto out) {
    fill(row_key(seed, kTokens, static_cast<std::uint64_t>(first_token + row), 0), 1.0F / 128, out);
  });
}

}  // namespace wherry
