// Every set of conversion kernels against the reference, bit for bit.
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "kernels/numerics_low.hpp"
#include "kernels/stages.hpp"
#include "unit/format/rows.hpp"

namespace wherry::test {
namespace {

using kernels::KernelSet;

// Payload and scales of one row; what the kernels do not write stays 0xEE.
std::vector<std::byte> quantised(const KernelSet& set, const WireFormat& format,
                                 const std::vector<std::byte>& x) {
  std::vector<std::byte> all(static_cast<std::size_t>(format.row_bytes() + 8), std::byte{0xEE});
  const auto scales_at = static_cast<std::size_t>((format.payload_bytes + 3) / 4 * 4);
  all.resize(scales_at + static_cast<std::size_t>(format.scale_bytes) + 8, std::byte{0xEE});
  set.quantize_row(format, x.data(), all.data(), all.data() + scales_at);
  return all;
}
std::vector<std::byte> dequantised(const KernelSet& set, const WireFormat& format,
                                   const std::vector<std::byte>& payload,
                                   const std::vector<std::byte>& scales) {
  const std::int64_t bytes = format.hidden * dtype_bytes(format.dtype);
  std::vector<std::byte> x(static_cast<std::size_t>(bytes + 8), std::byte{0xEE});
  set.dequantize_row(format, payload.data(), scales.data(), x.data());
  return x;
}

void expect_same(const WireFormat& format, const std::vector<std::byte>& x) {
  const KernelSet& reference = kernels::available().back();
  const std::vector<std::byte> want = quantised(reference, format, x);
  for (const KernelSet& set : kernels::available()) {
    const std::vector<std::byte> got = quantised(set, format, x);
    for (std::size_t i = 0; i < want.size(); ++i) {
      ASSERT_EQ(got[i], want[i]) << set.name << " " << name(format.wire) << " from "
                                 << name(format.dtype) << " [" << format.hidden << "] byte " << i;
    }
  }
}

// fp32 rows in each dtype that can be quantised.
std::vector<std::byte> as(DType dtype, const std::vector<float>& x) {
  const auto hidden = static_cast<std::int64_t>(x.size());
  std::vector<std::byte> bytes(static_cast<std::size_t>(hidden * dtype_bytes(dtype)));
  dequantize_row(wire_format(Wire::f32, dtype, hidden), x.data(), nullptr, bytes.data());
  return bytes;
}
constexpr DType kDTypes[] = {DType::bf16, DType::f16, DType::f32};
constexpr std::int64_t kHidden[] = {1, 31, 32, 64, 127, 128, 200, 257, 2056, 2880};

class EveryConversion : public testing::TestWithParam<Wire> {};
INSTANTIATE_TEST_SUITE_P(Kernels, EveryConversion, testing::ValuesIn(kQuantisedWires),
                         [](const auto& wire) { return std::string(name(wire.param)); });

TEST_P(EveryConversion, QuantisesArbitraryBitsAsTheReferenceDoes) {
  std::mt19937_64 random(1);
  for (const DType dtype : kDTypes) {
    for (const std::int64_t hidden : kHidden) {
      const WireFormat format = wire_format(GetParam(), dtype, hidden);
      std::vector<std::byte> x(static_cast<std::size_t>(hidden * dtype_bytes(dtype)));
      for (std::byte& byte : x) byte = static_cast<std::byte>(random());
      expect_same(format, x);
    }
  }
}

TEST_P(EveryConversion, QuantisesEveryMagnitudeWithItsZerosAndSignsAsTheReferenceDoes) {
  std::mt19937 random(2);
  std::normal_distribution<float> normal;
  for (const DType dtype : kDTypes) {
    for (int exponent = -149; exponent < 128; ++exponent) {
      const std::int64_t hidden = kHidden[static_cast<std::size_t>(exponent + 149) % 10];
      std::vector<float> x(static_cast<std::size_t>(hidden));
      for (float& value : x) value = std::ldexp(normal(random), exponent);
      for (std::size_t i = 0; i < x.size(); i += 5) x[i] = i % 2 == 0 ? -0.0F : 0.0F;
      expect_same(wire_format(GetParam(), dtype, hidden), as(dtype, x));
    }
  }
}

// A NaN or an infinity in one block in three: the kernels leave some blocks to the reference.
TEST_P(EveryConversion, QuantisesRowsWithFewNansAndInfinitiesAsTheReferenceDoes) {
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  for (const DType dtype : kDTypes) {
    std::vector<float> x(3000);
    for (float& value : x) value = normal(random);
    for (const std::size_t i : {5U, 400U, 1024U, 2999U}) x[i] = std::nanf("");
    for (const std::size_t i : {129U, 700U}) x[i] = -std::numeric_limits<float>::infinity();
    expect_same(wire_format(GetParam(), dtype, 3000), as(dtype, x));
  }
}

// Quotients as close to a rounding boundary as fp32 has them: where a division made of
// multiply-adds would show that it is not one.
TEST_P(EveryConversion, DividesExactlyAtEveryBoundaryBetweenTwoCodes) {
  std::mt19937 random(4);
  std::uniform_real_distribution<float> uniform(1.0F, 2.0F);
  std::vector<float> boundaries;
  boundaries.reserve(400);
  for (unsigned code = 0; code < 0x7E; ++code) {
    boundaries.push_back((low_to_float<E4M3>(code) + low_to_float<E4M3>(code + 1)) / 2);
  }
  for (unsigned code = 0x20; code < 0x7B; ++code) {
    boundaries.push_back((low_to_float<E5M2>(code) + low_to_float<E5M2>(code + 1)) / 2);
  }
  for (int i = 0; i < 127; ++i) boundaries.push_back(static_cast<float>(i) + 0.5F);
  for (int round = 0; round < 300; ++round) {
    const float amax = std::ldexp(uniform(random), round % 60 - 30);
    for (const float largest : {448.0F, 57344.0F, 127.0F}) {
      const float scale = amax / largest;
      std::vector<float> x(1152, amax);  // each block has the largest in its first place
      std::size_t at = 0;
      for (const float boundary : boundaries) {
        float value = boundary * scale;
        if (value > amax) continue;
        for (int step = 0; step < 2; ++step) value = std::nextafter(value, 0.0F);
        for (int step = 0; step < 5 && at + 1 < x.size(); ++step) {
          if (at % 32 == 0) ++at;
          x[at++] = step % 2 == 0 ? value : -value;
          value = std::nextafter(value, amax);
        }
      }
      for (std::size_t i = 0; i < x.size(); i += 32) x[i] = amax;
      expect_same(wire_format(GetParam(), DType::f32, 1152), as(DType::f32, x));
    }
  }
}

TEST_P(EveryConversion, DequantisesArbitraryCodesAndScalesAsTheReferenceDoes) {
  const KernelSet& reference = kernels::available().back();
  std::mt19937_64 random(5);
  std::uniform_int_distribution<int> exponent(-140, 127);
  for (const DType dtype : kDTypes) {
    for (const std::int64_t hidden : kHidden) {
      const WireFormat format = wire_format(GetParam(), dtype, hidden);
      std::vector<std::byte> payload(static_cast<std::size_t>(format.payload_bytes));
      std::vector<std::byte> scales(static_cast<std::size_t>(format.scale_bytes));
      for (int round = 0; round < 8; ++round) {
        for (std::byte& byte : payload) byte = static_cast<std::byte>(random());
        for (std::byte& byte : scales) byte = static_cast<std::byte>(random());
        if (format.scale_type == ScaleType::f32 && round > 2) {
          for (std::size_t i = 0; i < scales.size(); i += 4) {
            const float scale = std::ldexp(1.3F, round == 7 ? exponent(random) : round - 9);
            std::memcpy(scales.data() + i, &scale, 4);
          }
        }
        const auto want = dequantised(reference, format, payload, scales);
        for (const KernelSet& set : kernels::available()) {
          ASSERT_EQ(dequantised(set, format, payload, scales), want)
              << set.name << " " << name(format.wire) << " to " << name(dtype) << " [" << hidden
              << "]";
        }
      }
    }
  }
}

}  // namespace
}  // namespace wherry::test
