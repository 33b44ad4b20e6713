// The plain implementation: sums in index order, multiply then add, in fp32. It defines what the
// experts compute, and runs where oneDNN does not.
#include <cstring>

#include "experts/panels.hpp"
#include "kernels/numerics.hpp"

namespace wherry::experts {
namespace {

constexpr int kCols = 8;  // 4 rows x 8 columns of sums fit the 16 registers of any x86-64
constexpr int kRows = 4;

// Four columns: the compilers' own vectors, because they do not find them in plain arrays here.
using Floats [[gnu::vector_size(16)]] = float;
using Words [[gnu::vector_size(16)]] = std::uint32_t;
using Halves [[gnu::vector_size(8)]] = std::uint16_t;

Floats load_columns(const float* from) {
  Floats values;
  std::memcpy(&values, from, sizeof(values));
  return values;
}
Floats load_columns(const std::uint16_t* from) {
  Halves values;
  std::memcpy(&values, from, sizeof(values));
  return reinterpret_cast<Floats>(__builtin_convertvector(values, Words) << 16);
}
float load(float value) { return value; }
float load(std::uint16_t value) { return bf16_to_float(value); }

// result[r][c] = sum over i, ascending, of rows[r][i] * strip[i][c], for 8 columns c.
template <int kNumRows, typename Element>
void multiply_strip(const Element* rows, std::int64_t inner, const Element* strip, float* result,
                    std::int64_t result_pitch) {
  Floats low[kNumRows] = {}, high[kNumRows] = {};
  for (std::int64_t i = 0; i < inner; ++i) {
    const Floats weights_low = load_columns(strip + i * kCols);
    const Floats weights_high = load_columns(strip + i * kCols + 4);
    for (int r = 0; r < kNumRows; ++r) {
      const float x = load(rows[r * inner + i]);
      low[r] += x * weights_low;
      high[r] += x * weights_high;
    }
  }
  for (int r = 0; r < kNumRows; ++r) {
    std::memcpy(result + r * result_pitch, &low[r], sizeof(low[r]));
    std::memcpy(result + r * result_pitch + 4, &high[r], sizeof(high[r]));
  }
}

// A panel is cols / 8 strips [inner, 8].
template <typename Element>
class PlainMatmul final : public PanelMatmul {
 public:
  explicit PlainMatmul(const PanelShape& shape) : inner_(shape.inner), cols_(shape.cols) {}

  [[nodiscard]] std::size_t panel_bytes() const override {
    return static_cast<std::size_t>(inner_ * cols_) * sizeof(Element);
  }

  void pack(const std::byte* weights, std::byte* panel) const override {
    const auto* from = reinterpret_cast<const Element*>(weights);
    auto* to = reinterpret_cast<Element*>(panel);
    for (std::int64_t strip = 0; strip < cols_; strip += kCols) {
      for (std::int64_t i = 0; i < inner_; ++i) {
        for (int c = 0; c < kCols; ++c) *to++ = from[(strip + c) * inner_ + i];
      }
    }
  }

  void multiply(const std::byte* rows, std::int64_t num_rows, const std::byte* panel,
                float* result) const override {
    const auto* x = reinterpret_cast<const Element*>(rows);
    const auto* weights = reinterpret_cast<const Element*>(panel);
    for (std::int64_t strip = 0; strip < cols_; strip += kCols) {
      const Element* const w = weights + strip * inner_;
      std::int64_t row = 0;
      for (; row + kRows <= num_rows; row += kRows) {
        multiply_strip<kRows>(x + row * inner_, inner_, w, result + row * cols_ + strip, cols_);
      }
      for (; row < num_rows; ++row) {
        multiply_strip<1>(x + row * inner_, inner_, w, result + row * cols_ + strip, cols_);
      }
    }
  }

 private:
  std::int64_t inner_, cols_;
};

}  // namespace

std::unique_ptr<PanelMatmul> make_plain_matmul(const PanelShape& shape) {
  if (shape.dtype == DType::f32) return std::make_unique<PlainMatmul<float>>(shape);
  return std::make_unique<PlainMatmul<std::uint16_t>>(shape);
}

}  // namespace wherry::experts
