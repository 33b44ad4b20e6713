// Whole tensors: scale planes, plain wires, arguments that cannot be right.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <string>

#include "kernels/scale_places.hpp"
#include "kernels/wires.hpp"
#include "unit/format/rows.hpp"
#include "wherry/error.hpp"

namespace wherry::test {
namespace {

// Rows of fp32 and their planes.
struct Planes {
  WireFormat format;
  std::vector<std::byte> payload, scales;
};
Planes convert_rows(Wire wire, const std::vector<float>& x, std::int64_t rows, ScaleLayout layout) {
  Planes planes;
  const auto hidden = static_cast<std::int64_t>(x.size()) / rows;
  planes.format = wire_format(wire, DType::f32, hidden, layout);
  planes.payload.resize(static_cast<std::size_t>(rows * planes.format.payload_pitch()));
  planes.scales.assign(static_cast<std::size_t>(scale_plane_bytes(planes.format, rows)),
                       std::byte{0xEE});
  quantize(planes.format, {x.data(), DType::f32, rows, hidden},
           {planes.payload.data(), planes.scales.data(), rows});
  return planes;
}
std::vector<float> back(const Planes& planes, std::int64_t rows) {
  std::vector<float> x(static_cast<std::size_t>(rows * planes.format.hidden));
  TensorView view;
  view.data = x.data();
  view.dtype = DType::f32;
  view.rows = rows;
  view.cols = planes.format.hidden;
  dequantize(planes.format, {planes.payload.data(), planes.scales.data(), rows}, view);
  return x;
}
std::vector<float> random_rows(std::int64_t rows, std::int64_t hidden) {
  std::mt19937 random(11);
  std::normal_distribution<float> normal;
  std::vector<float> x(static_cast<std::size_t>(rows * hidden));
  for (std::size_t i = 0; i < x.size(); ++i) {
    x[i] = std::ldexp(normal(random), static_cast<int>(i / 16 % 9));
  }
  return x;
}

TEST(ScalePlane, EveryLayoutHoldsTheSameScalesAndReadsBackTheSameRows) {
  constexpr std::int64_t kRows = 5;
  constexpr std::int64_t kHidden = 300;
  const std::vector<float> x = random_rows(kRows, kHidden);
  for (const Wire wire : kQuantisedWires) {
    const std::vector<float> want =
        back(convert_rows(wire, x, kRows, ScaleLayout::row_major), kRows);
    const Planes columns = convert_rows(wire, x, kRows, ScaleLayout::column_major);
    EXPECT_EQ(back(columns, kRows), want) << name(wire);
    for (std::int64_t row = 0; row < kRows; ++row) {
      const ConvertedRow alone =
          convert(wire, {x.begin() + row * kHidden, x.begin() + (row + 1) * kHidden});
      const std::size_t each = alone.format.scale_type == ScaleType::f32 ? 4 : 1;
      for (std::int64_t block = 0; block < alone.format.num_blocks; ++block) {
        const std::int64_t at = scale_offset(columns.format, kRows, row, block);
        EXPECT_EQ(std::memcmp(columns.scales.data() + at,
                              alone.scales.data() + static_cast<std::size_t>(block) * each, each),
                  0)
            << name(wire) << " row " << row << " block " << block;
      }
    }
  }
}

TEST(ScalePlane, PackedBytesAreFourBlocksAWordAndTheRestIsZero) {
  constexpr std::int64_t kRows = 5;
  const std::vector<float> x = random_rows(kRows, 700);  // 6 blocks of 128
  const Planes packed = convert_rows(Wire::e4m3_block128_pow2, x, kRows, ScaleLayout::packed_ue8m0);
  const Planes plain = convert_rows(Wire::e4m3_block128_pow2, x, kRows, ScaleLayout::row_major);
  EXPECT_EQ(packed.payload, plain.payload);
  EXPECT_EQ(back(packed, kRows), back(plain, kRows));
  ASSERT_EQ(packed.scales.size(), 64U);  // 2 lines of 5 words, each up to 32 bytes
  for (std::size_t line = 0; line < 2; ++line) {
    for (std::size_t at = 0; at < 32; ++at) {
      const std::size_t row = at / 4;
      const std::size_t block = line * 4 + at % 4;
      const auto byte = std::to_integer<std::uint32_t>(packed.scales[line * 32 + at]);
      if (row >= 5 || block >= 6) {
        EXPECT_EQ(byte, 0U) << line << " " << at;
        continue;
      }
      float scale = 0;
      std::memcpy(&scale, plain.scales.data() + row * 32 + block * 4, 4);
      EXPECT_EQ(e8m0_to_float(byte), scale) << line << " " << at;
    }
  }
}

TEST(ScalePlane, SizesAreThoseOfTheDescription) {
  const auto bytes = [](Wire wire, ScaleLayout layout) {
    return scale_plane_bytes(wire_format(wire, DType::bf16, 7168, layout), 10);
  };
  EXPECT_EQ(bytes(Wire::bf16, ScaleLayout::row_major), 0);
  EXPECT_EQ(bytes(Wire::e4m3_block128, ScaleLayout::row_major), 10 * 224);
  EXPECT_EQ(bytes(Wire::e4m3_block128, ScaleLayout::column_major), 56 * 48);
  EXPECT_EQ(bytes(Wire::e4m3_block128_pow2, ScaleLayout::packed_ue8m0), 14 * 48);
  EXPECT_EQ(bytes(Wire::mxfp8_e4m3, ScaleLayout::row_major), 10 * 224);
  EXPECT_EQ(bytes(Wire::mxfp8_e4m3, ScaleLayout::packed_ue8m0), 56 * 48);
  EXPECT_EQ(bytes(Wire::nvfp4, ScaleLayout::row_major), 10 * 464);  // 448 + 4, up to 16
  EXPECT_EQ(bytes(Wire::nvfp4, ScaleLayout::column_major), 448 * 16 + 48);
  EXPECT_EQ(bytes(Wire::int8_token, ScaleLayout::row_major), 10 * 16);
  EXPECT_EQ(bytes(Wire::int8_token, ScaleLayout::column_major), 48);
}

// Kernels write the scales place by place: no two share a byte, all lie in the plane, and together they are
// what put_scales() writes of a row.
TEST(ScalePlane, EveryScaleHasAPlaceOfItsOwn) {
  constexpr std::int64_t kRows = 5;
  for (const Wire wire : all_wires()) {
    for (const ScaleLayout layout :
         {ScaleLayout::row_major, ScaleLayout::column_major, ScaleLayout::packed_ue8m0}) {
      for (const std::int64_t hidden : {1, 127, 200, 1040}) {
        WireFormat format;
        try {
          format = wire_format(wire, DType::f32, hidden, layout);
        } catch (const Error&) {
          continue;  // packed scales that are no powers of two, and raw
        }
        if (!format.quantised()) continue;
        std::vector<int> written(static_cast<std::size_t>(scale_plane_bytes(format, kRows)));
        const auto write = [&](std::int64_t at, std::int64_t bytes) {
          for (std::int64_t i = at; i < at + bytes; ++i) ++written.at(static_cast<std::size_t>(i));
        };
        std::vector<std::byte> expected(written.size());
        const std::vector<std::byte> alone(static_cast<std::size_t>(format.scale_bytes),
                                           std::byte{1});
        for (std::int64_t row = 0; row < kRows; ++row) {
          for (std::int64_t block = 0; block < kernels::num_scale_places(format); ++block) {
            write(kernels::scale_place(format, kRows, row, block),
                  kernels::block_scale_bytes(format));
          }
          if (format.scale_type == ScaleType::e4m3_f32) {
            write(kernels::row_scale_place(format, kRows, row), 4);
          }
          kernels::put_scales(format, expected.data(), kRows, row, alone.data());
        }
        for (std::size_t i = 0; i < written.size(); ++i) {
          ASSERT_EQ(written[i], std::to_integer<int>(expected[i]))
              << name(wire) << ' ' << name(layout) << " hidden " << hidden << " byte " << i;
        }
      }
    }
  }
}

TEST(WireFormats, BytesOfARowOf7168) {
  const auto bytes = [](Wire wire) { return wire_format(wire, DType::bf16, 7168).row_bytes(); };
  EXPECT_EQ(bytes(Wire::same), 14336);
  EXPECT_EQ(bytes(Wire::f32), 28672);
  EXPECT_EQ(bytes(Wire::e4m3_block128), 7168 + 224);
  EXPECT_EQ(bytes(Wire::mxfp8_e5m2), 7168 + 224);
  EXPECT_EQ(bytes(Wire::nvfp4), 3584 + 448 + 4);
  EXPECT_EQ(bytes(Wire::int8_token), 7168 + 4);
}

TEST(PlainWires, TheSameDtypeMovesBitsEvenOfANan) {
  for (const DType dtype : {DType::bf16, DType::f16, DType::f32, DType::f64, DType::raw}) {
    std::vector<std::uint64_t> x(16), there(16), again(16);
    std::mt19937_64 random(2);
    for (auto& bits : x) bits = random();
    x[3] = 0x7FF0000000000001U;  // signalling in f64
    x[4] = 0x7F8000017F800001U;  // in f32
    x[5] = 0x7F817C017F817C01U;  // in the others
    const WireFormat format = wire_format(Wire::same, dtype, 128 / dtype_bytes(dtype));
    quantize_row(format, x.data(), there.data(), nullptr);
    dequantize_row(format, there.data(), nullptr, again.data());
    EXPECT_EQ(there, x) << name(dtype);
    EXPECT_EQ(again, x) << name(dtype);
  }
}

TEST(PlainWires, NarrowingRoundsOnceAndWideningIsExact) {
  const std::vector<double> x = {1 + 0x1p-8 + 0x1p-40, -0.0, 1e300, 0x1p-1074, std::nan("")};
  std::vector<std::uint16_t> narrow(5);
  quantize_row(wire_format(Wire::bf16, DType::f64, 5), x.data(), narrow.data(), nullptr);
  EXPECT_THAT(narrow, testing::ElementsAre(0x3F81, 0x8000, 0x7F80, 0, 0x7FC0));
  std::vector<double> wide(5);
  dequantize_row(wire_format(Wire::bf16, DType::f64, 5), narrow.data(), nullptr, wide.data());
  EXPECT_EQ(wide[0], 1 + 0x1p-7);
  EXPECT_TRUE(std::signbit(wide[1]));
  EXPECT_EQ(wide[2], std::numeric_limits<double>::infinity());

  const std::vector<std::uint16_t> halves = {0x3C01, 0x0001, 0xFC00, 0x7C01};
  std::vector<float> floats(4);
  quantize_row(wire_format(Wire::f32, DType::f16, 4), halves.data(), floats.data(), nullptr);
  EXPECT_EQ(floats[0], 1.0009765625F);
  EXPECT_EQ(floats[1], 0x1p-24F);
  EXPECT_EQ(floats[2], -std::numeric_limits<float>::infinity());
  EXPECT_EQ(float_bits(floats[3]), 0x7FC00000U);
}

TEST(Tensors, RowsWithAPitchAndNoRowsAtAllWork) {
  std::vector<float> x = random_rows(3, 40);
  const WireFormat format = wire_format(Wire::e4m3_block128, DType::f32, 36);
  std::vector<std::byte> payload(3 * 50), scales(3 * 16);
  quantize(format, {x.data(), DType::f32, 3, 36, 160}, {payload.data(), scales.data(), 3, 50});
  for (std::int64_t row = 0; row < 3; ++row) {
    const ConvertedRow alone =
        convert(Wire::e4m3_block128, {x.begin() + row * 40, x.begin() + row * 40 + 36});
    EXPECT_EQ(std::memcmp(payload.data() + row * 50, alone.payload.data(), 36), 0);
  }
  quantize(format, {nullptr, DType::f32, 0, 36}, {nullptr, nullptr, 0});
}

template <typename Fn>
std::string message_of(Fn fn) {
  try {
    fn();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::bad_argument);
    EXPECT_EQ(error.stage(), Stage::format);
    return error.what();
  }
  return "no error";
}

TEST(FormatErrors, ImpossibleFormatsAreErrorsThatSayWhatIsAllowed) {
  using testing::HasSubstr;
  EXPECT_THAT(message_of([] { static_cast<void>(wire_format(Wire::bf16, DType::bf16, 0)); }),
              HasSubstr("hidden is 0; allowed: 1 to"));
  EXPECT_THAT(message_of([] { static_cast<void>(wire_format(Wire::nvfp4, DType::f64, 8)); }),
              HasSubstr("take bf16, f16, f32"));
  EXPECT_THAT(message_of([] { static_cast<void>(wire_format(Wire::raw, DType::bf16, 8)); }),
              HasSubstr("raw goes with raw alone"));
  EXPECT_THAT(message_of([] { static_cast<void>(wire_format(Wire::nvfp4, DType::raw, 8)); }),
              HasSubstr("raw goes with raw alone"));
  EXPECT_THAT(message_of([] {
                static_cast<void>(
                    wire_format(Wire::e4m3_block128, DType::bf16, 8, ScaleLayout::packed_ue8m0));
              }),
              HasSubstr("*_pow2 and mxfp8_* alone"));
  EXPECT_THAT(message_of([] { static_cast<void>(wire_named("fp8")); }),
              HasSubstr("'fp8'; there are: same, bf16, f16"));
}

TEST(FormatErrors, TensorsThatDoNotFitAreErrors) {
  using testing::HasSubstr;
  std::vector<float> x(16);
  std::vector<std::byte> payload(64), scales(64);
  const WireFormat format = wire_format(Wire::e4m3_block128, DType::f32, 8);
  const WireRows out{payload.data(), scales.data(), 2};
  const auto error = [&](ConstTensorView view, const WireRows& to) {
    return message_of([&] { quantize(format, view, to); });
  };
  EXPECT_THAT(error({x.data(), DType::bf16, 2, 8}, out), HasSubstr("8 columns of bf16"));
  EXPECT_THAT(error({x.data(), DType::f32, 2, 7}, out), HasSubstr("7 columns of f32"));
  EXPECT_THAT(error({nullptr, DType::f32, 2, 8}, out), HasSubstr("x has 2 rows at"));
  EXPECT_THAT(error({x.data(), DType::f32, 2, 8, 30}, out), HasSubstr("pitch of x is 30"));
  EXPECT_THAT(error({x.data(), DType::f32, 1, 8}, out), HasSubstr("both must be the same"));
  const ConstTensorView good{x.data(), DType::f32, 2, 8};
  EXPECT_THAT(error(good, {payload.data(), nullptr, 2}), HasSubstr("scales is null"));
  EXPECT_THAT(error(good, {nullptr, scales.data(), 2}), HasSubstr("payload is null"));
  EXPECT_THAT(error(good, {payload.data(), scales.data(), 2, 7}), HasSubstr("at least 8"));
}

TEST(WireFormats, EveryWireIsFoundByItsName) {
  for (const Wire wire : all_wires()) EXPECT_EQ(wire_named(name(wire)), wire);
  EXPECT_EQ(all_wires().size(), 16U);
}

}  // namespace
}  // namespace wherry::test
