// What wire formats cost: bytes of a row, error, and how fast one core converts bf16 rows to them and
// back, for each kernel set, with a plain copy of the same rows beside it.
//
//   format_bench [HIDDEN [ROWS]]
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "kernels/numerics.hpp"
#include "kernels/stages.hpp"
#include "wherry/format.hpp"

namespace {

using namespace wherry;

struct Rows {
  std::int64_t hidden, count;
  std::vector<std::uint16_t> x;

  [[nodiscard]] double bytes() const { return static_cast<double>(x.size()) * 2; }
};

Rows make_rows(std::int64_t hidden, std::int64_t count) {
  Rows rows{hidden, count, {}};
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  for (std::int64_t i = 0; i < hidden * count; ++i) rows.x.push_back(float_to_bf16(normal(random)));
  return rows;
}

// GB/s of bf16, the median of at least 31 passes over all rows and a tenth of a second.
template <typename Fn>
double rate(const Rows& rows, Fn pass) {
  using Clock = std::chrono::steady_clock;
  std::vector<double> seconds;
  double all = 0;
  while (seconds.size() < 31 || all < 0.1) {
    const auto start = Clock::now();
    pass();
    seconds.push_back(std::chrono::duration<double>(Clock::now() - start).count());
    all += seconds.back();
  }
  std::ranges::nth_element(seconds, seconds.begin() + static_cast<long>(seconds.size() / 2));
  return rows.bytes() / seconds[seconds.size() / 2] / 1e9;
}

// Root mean square of the error over that of the values.
double relative_error(const std::vector<std::uint16_t>& got, const std::vector<std::uint16_t>& x) {
  double error = 0;
  double power = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double value = bf16_to_float(x[i]);
    const double difference = static_cast<double>(bf16_to_float(got[i])) - value;
    error += difference * difference;
    power += value * value;
  }
  return std::sqrt(error / power);
}

void measure(const Rows& rows, Wire wire, const kernels::KernelSet& set) {
  const WireFormat format = wire_format(wire, DType::bf16, rows.hidden);
  const auto plane = [&](std::int64_t pitch) {
    return std::vector<std::byte>(static_cast<std::size_t>(rows.count * pitch));
  };
  auto payload = plane(format.payload_pitch());
  auto scales = plane(format.scale_pitch());
  std::vector<std::uint16_t> back(rows.x.size());
  const auto* x = reinterpret_cast<const std::byte*>(rows.x.data());
  auto* y = reinterpret_cast<std::byte*>(back.data());
  const auto each = [&](auto convert) {
    for (std::int64_t row = 0; row < rows.count; ++row) {
      convert(row * rows.hidden * 2, payload.data() + row * format.payload_pitch(),
              scales.data() + row * format.scale_pitch());
    }
  };
  const double there = rate(rows, [&] {
    each([&](std::int64_t at, std::byte* p, std::byte* s) {
      set.quantize_row(format, x + at, p, s);
    });
  });
  const double again = rate(rows, [&] {
    each([&](std::int64_t at, std::byte* p, std::byte* s) {
      set.dequantize_row(format, p, s, y + at);
    });
  });
  fmt::print("{:<26} {:<10} {:>9} {:>8.4f} {:>9.2f} {:>9.2f}\n", name(wire), set.name,
             format.row_bytes(), relative_error(back, rows.x), there, again);
}

}  // namespace

int main(int argc, char** argv) {
  const std::int64_t hidden = argc > 1 ? std::atoll(argv[1]) : 7168;
  const std::int64_t count = argc > 2 ? std::atoll(argv[2]) : 32;
  if (hidden < 1 || count < 1) {
    fmt::print(stderr, "format_bench [HIDDEN [ROWS]]: both 1 or more\n");
    return 2;
  }
  const Rows rows = make_rows(hidden, count);
  std::vector<std::uint16_t> copy(rows.x.size());
  const double copied =
      rate(rows, [&] { std::memcpy(copy.data(), rows.x.data(), rows.x.size() * 2); });
  fmt::print("{} bf16 rows of {}, normal; GB/s of bf16 on one core; a copy of them: {:.2f}\n\n",
             count, hidden, copied);
  fmt::print("{:<26} {:<10} {:>9} {:>8} {:>9} {:>9}\n", "wire", "kernels", "row bytes", "error",
             "quantise", "back");
  for (const Wire wire : all_wires()) {
    if (wire == Wire::raw || wire == Wire::same) continue;
    for (const kernels::KernelSet& set : kernels::available()) measure(rows, wire, set);
  }
  return 0;
}
