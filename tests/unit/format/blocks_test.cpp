// What each wire format promises about scales, zeros, NaN, infinity and short blocks, by values that
// can be worked out by hand. (oracle/ compares whole rows with NumPy.)
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "unit/format/rows.hpp"

namespace wherry::test {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLargest = std::numeric_limits<float>::max();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

std::string wire_name(const testing::TestParamInfo<Wire>& info) {
  return std::string(name(info.param));
}
// The first element of the block that holds element i, and the one after its last.
std::pair<std::size_t, std::size_t> block_of(const WireFormat& format, std::size_t i) {
  const auto block = static_cast<std::size_t>(format.block);
  const std::size_t begin = i / block * block;
  return {begin, std::min(begin + block, static_cast<std::size_t>(format.hidden))};
}
bool keeps_nan_in_its_element(const WireFormat& format) { return format.block == 128; }

class EveryWire : public testing::TestWithParam<Wire> {};
INSTANTIATE_TEST_SUITE_P(Formats, EveryWire, testing::ValuesIn(kQuantisedWires), wire_name);

TEST_P(EveryWire, RowsOfZerosStayZerosWithTheirSign) {
  std::vector<float> x(300, 0.0F);
  x[7] = -0.0F;
  const std::vector<float> back = convert(GetParam(), x).values();
  for (std::size_t i = 0; i < x.size(); ++i) {
    EXPECT_EQ(back[i], 0.0F) << i;
    EXPECT_EQ(std::signbit(back[i]), i == 7 && GetParam() != Wire::int8_token) << i;
  }
}

TEST_P(EveryWire, ANanStaysWhereItWasAndSpreadsToNoOtherBlock) {
  std::vector<float> x(300);
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i % 7) + 1.0F;
  const std::vector<float> without = convert(GetParam(), x).values();
  for (const std::size_t at : {0U, 127U, 128U, 299U}) {
    std::vector<float> with = x;
    with[at] = -kNan;
    const ConvertedRow row = convert(GetParam(), with);
    const std::vector<float> back = row.values();
    const auto [begin, end] = block_of(row.format, at);
    for (std::size_t i = 0; i < x.size(); ++i) {
      if (i == at || (i >= begin && i < end && !keeps_nan_in_its_element(row.format))) {
        EXPECT_EQ(float_bits(back[i]), 0x7FC00000U) << "NaN at " << at << ", element " << i;
      } else {
        EXPECT_EQ(back[i], without[i]) << "NaN at " << at << ", element " << i;
      }
    }
  }
}

TEST_P(EveryWire, InfinitySaturatesAndTouchesNoOtherBlockButThroughTheRowScale) {
  std::vector<float> x(300, 1.0F);
  x[130] = -kInfinity;
  const ConvertedRow row = convert(GetParam(), x);
  const std::vector<float> back = row.values();
  EXPECT_LT(back[130], -kLargest / 1.01F);
  EXPECT_FALSE(std::isnan(back[131]));
  if (row.format.block == 300 || GetParam() == Wire::nvfp4) return;
  EXPECT_EQ(back[0], convert(GetParam(), std::vector<float>(300, 1.0F)).values()[0]);
}

TEST_P(EveryWire, TheSmallestSubnormalsMakeNoNan) {
  std::vector<float> x(300, std::numeric_limits<float>::denorm_min());
  x[200] = 0.0F;
  for (const float value : convert(GetParam(), x).values()) {
    EXPECT_GE(value, 0.0F);
    EXPECT_LE(value, 1e-30F);
  }
}

TEST_P(EveryWire, AnyHiddenSizeIsTheSameRowCutShort) {
  std::vector<float> x(513);
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  for (float& value : x) value = normal(random);
  x[0] = 9.0F;  // the largest: the scale of a row is the same however short it is
  const ConvertedRow whole = convert(GetParam(), x);
  for (const std::size_t hidden : {1U, 8U, 15U, 16U, 17U, 31U, 33U, 127U, 128U, 129U, 256U, 257U}) {
    const ConvertedRow cut =
        convert(GetParam(), {x.begin(), x.begin() + static_cast<long>(hidden)});
    const std::size_t whole_blocks = hidden / static_cast<std::size_t>(cut.format.block);
    const std::size_t certain = cut.format.block > 200 || whole_blocks == 0
                                    ? std::min<std::size_t>(hidden, 1)
                                    : whole_blocks * static_cast<std::size_t>(cut.format.block);
    for (std::size_t i = 0; i < certain; ++i) ASSERT_EQ(cut.code(i), whole.code(i)) << hidden;
    ASSERT_EQ(cut.format.payload_bytes, GetParam() == Wire::nvfp4
                                            ? (static_cast<std::int64_t>(hidden) + 1) / 2
                                            : static_cast<std::int64_t>(hidden));
  }
}

TEST_P(EveryWire, TheErrorStaysWithinHalfAStepOfTheFormat) {
  std::vector<float> x(1000);
  std::mt19937 random(5);
  std::normal_distribution<float> normal;
  for (float& value : x) value = normal(random);
  const ConvertedRow row = convert(GetParam(), x);
  const std::vector<float> back = row.values();
  for (std::size_t i = 0; i < x.size(); ++i) {
    const auto [begin, end] = block_of(row.format, i);
    float amax = 0;
    for (std::size_t j = begin; j < end; ++j) amax = std::max(amax, std::abs(x[j]));
    const std::string_view wire = name(GetParam());
    const float relative = wire.find("e4m3") != wire.npos   ? 1.0F / 16
                           : wire.find("e5m2") != wire.npos ? 1.0F / 8
                           : GetParam() == Wire::nvfp4      ? 0.25F
                                                            : 0.0F;
    // nvfp4's own scale is rounded too, and its first step is a sixth of the block's largest.
    const float absolute = GetParam() == Wire::nvfp4 ? amax / 12 * 1.07F
                           : relative == 0.0F        ? amax / 254 * 1.001F
                                                     : amax / 10'000;
    EXPECT_LE(std::abs(back[i] - x[i]), std::max(relative * std::abs(x[i]) * 1.001F, absolute))
        << i;
  }
}

TEST(E4m3Block128, TheScaleIsAmaxOver448) {
  std::vector<float> x(256, 0.5F);
  x[3] = -896.0F;
  const ConvertedRow row = convert(Wire::e4m3_block128, x);
  EXPECT_EQ(row.scale(0), 2.0F);
  EXPECT_EQ(row.scale(1), 0.5F / 448.0F);
  EXPECT_EQ(row.code(3), 0xFEU);
  EXPECT_EQ(row.code(0), 0x28U);  // 0.25
  EXPECT_EQ(row.code(255), 0x7EU);
}

TEST(E4m3Block128, ABlockOfZerosHasScaleOne) {
  EXPECT_EQ(convert(Wire::e4m3_block128, std::vector<float>(5, 0.0F)).scale(0), 1.0F);
  EXPECT_EQ(convert(Wire::e4m3_block128_pow2, std::vector<float>(5, 0.0F)).scale(0), 1.0F);
  EXPECT_EQ(convert(Wire::e5m2_block128, std::vector<float>(5, -0.0F)).scale(0), 1.0F);
  EXPECT_EQ(convert(Wire::int8_token, std::vector<float>(5, -0.0F)).scale(0), 1.0F);
}

TEST(E4m3Block128, ABlockOfNansHasScaleOne) {
  const ConvertedRow row = convert(Wire::e4m3_block128, std::vector<float>(5, kNan));
  EXPECT_EQ(row.scale(0), 1.0F);
  EXPECT_EQ(row.code(4), 0x7FU);
}

TEST(E4m3Block128, InfinityIsTheLargestFiniteValue) {
  const ConvertedRow row = convert(Wire::e4m3_block128, {kInfinity, 1.0F, -kInfinity});
  EXPECT_EQ(row.scale(0), kLargest / 448.0F);
  EXPECT_THAT(row.values(), testing::ElementsAre(kLargest, 0.0F, -kLargest));
}

TEST(E4m3Block128, PowerOfTwoScalesNeverClip) {
  const ConvertedRow tight = convert(Wire::e4m3_block128_pow2, {448.0F, 1.0F});
  EXPECT_EQ(tight.scale(0), 1.0F);
  EXPECT_THAT(tight.values(), testing::ElementsAre(448.0F, 1.0F));
  EXPECT_EQ(convert(Wire::e4m3_block128_pow2, {std::nextafter(448.0F, 449.0F)}).scale(0), 2.0F);
  EXPECT_EQ(convert(Wire::e4m3_block128_pow2, {1e-40F}).scale(0), std::ldexp(1.0F, -127));
}

TEST(E4m3Block128, DeepEpMultipliesByARoundedReciprocalAndClampsAmax) {
  const ConvertedRow zeros = convert(Wire::e4m3_block128_deepep, std::vector<float>(128, 0.0F));
  EXPECT_EQ(zeros.scale(0), 1e-4F * (1.0F / 448.0F));
  // Its fp32(1/448) is above 1/448: for most amax the scale differs in the last bit.
  int different = 0;
  for (int i = 1; i <= 1000; ++i) {
    const float amax = 1.0F + static_cast<float>(i) / 1024.0F;
    const ConvertedRow ours = convert(Wire::e4m3_block128, {amax});
    const ConvertedRow theirs = convert(Wire::e4m3_block128_deepep, {amax});
    EXPECT_EQ(ours.scale(0), amax / 448.0F);
    EXPECT_EQ(theirs.scale(0), amax * (1.0F / 448.0F));
    different += ours.scale(0) != theirs.scale(0) ? 1 : 0;
  }
  EXPECT_GT(different, 100);
  EXPECT_EQ(convert(Wire::e4m3_block128_deepep_pow2, {448.0F}).scale(0), 1.0F);
  EXPECT_EQ(convert(Wire::e4m3_block128_deepep_pow2, {0.0F}).scale(0), std::ldexp(1.0F, -22));
}

TEST(Mxfp8, InfinityAndNanAreInTheByteOfTheirBlock) {
  std::vector<float> x(96, 1.0F);
  x[0] = kInfinity;
  x[40] = kNan;
  const ConvertedRow row = convert(Wire::mxfp8_e4m3, x);
  EXPECT_EQ(row.scale_byte(0), 254U);
  EXPECT_EQ(row.scale_byte(1), 255U);
  EXPECT_EQ(row.scale_byte(2), 119U);
  EXPECT_EQ(row.code(0), 0x7EU);
  EXPECT_EQ(row.code(63), 0x7FU);
  EXPECT_EQ(row.values()[0], kInfinity);
}

TEST(Mxfp8, E5m2ScalesBy57344) {
  EXPECT_EQ(convert(Wire::mxfp8_e5m2, {57344.0F}).scale_byte(0), 127U);
  EXPECT_EQ(convert(Wire::mxfp8_e5m2, {std::nextafter(57344.0F, 6e4F)}).scale_byte(0), 128U);
}

TEST(Nvfp4, ScalesAndPackingOfARowWorkedOutByHand) {
  std::vector<float> x(18, 0.0F);
  x[0] = 2688.0F;  // row scale 1, block scale 448
  x[1] = -448.0F;
  x[16] = 6.0F;  // block scale 1
  x[17] = 1.5F;
  const ConvertedRow row = convert(Wire::nvfp4, x);
  ASSERT_EQ(row.payload.size(), 9U);
  ASSERT_EQ(row.scales.size(), 8U);  // two blocks, up to 4, and the fp32
  EXPECT_EQ(row.row_scale(), 1.0F);
  EXPECT_EQ(row.scale_byte(0), 0x7EU);
  EXPECT_EQ(row.scale_byte(1), 0x38U);
  EXPECT_EQ(row.scale_byte(2), 0U);
  EXPECT_EQ(row.payload[0], std::byte{0xA7});  // 6, then -1 in the high half
  EXPECT_EQ(row.payload[8], std::byte{0x37});  // 6 and 1.5
  EXPECT_EQ(row.values(), x);
}

TEST(Nvfp4, ABlockFarBelowItsRowBecomesZeros) {
  std::vector<float> x(32, -1e-6F);
  x[0] = 1000.0F;
  const ConvertedRow row = convert(Wire::nvfp4, x);
  EXPECT_EQ(row.scale_byte(1), 0U);
  EXPECT_EQ(row.values()[31], 0.0F);
}

TEST(Nvfp4, AnOddRowLeavesTheLastHalfByteZero) {
  EXPECT_EQ(convert(Wire::nvfp4, {-6.0F, -6.0F, -6.0F}).payload[1], std::byte{0x0F});
}

TEST(Int8Token, OneScaleServesTheRow) {
  const ConvertedRow row = convert(Wire::int8_token, {254.0F, -254.0F, 1.0F, 3.0F, 0.9F});
  EXPECT_EQ(row.scale(0), 2.0F);
  EXPECT_EQ(row.code(0), 127U);
  EXPECT_EQ(row.code(1), 129U);  // -127
  EXPECT_EQ(row.code(2), 0U);    // 0.5, to even
  EXPECT_EQ(row.code(3), 2U);    // 1.5, to even
  EXPECT_EQ(row.code(4), 0U);
}

TEST(Int8Token, ANanTakesTheRowAndLeavesZeroCodes) {
  const ConvertedRow row = convert(Wire::int8_token, {1.0F, kNan, 2.0F});
  EXPECT_EQ(float_bits(row.scale(0)), 0x7FC00000U);
  EXPECT_EQ(row.code(0), 0U);
}

}  // namespace
}  // namespace wherry::test
