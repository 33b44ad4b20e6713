// How launches on a GPU are shaped: pure functions, which need none.
#include <gtest/gtest.h>

#include "kernels/cuda/launch.hpp"

namespace wherry::kernels::cuda {
namespace {

ConversionShape shape_of(std::int64_t tokens, std::int64_t hidden, Wire wire, int num_sms = 16) {
  return choose_conversion_shape({tokens, hidden, num_sms, wire});
}

TEST(ConversionShape, GivesAWarpWholeRowsWhereThereAreManyTokens) {
  for (const Wire wire : {Wire::mxfp8_e4m3, Wire::int8_token, Wire::nvfp4, Wire::f16}) {
    EXPECT_EQ(shape_of(4096, 7168, wire).parts, 1);
    EXPECT_EQ(shape_of(4096, 7168, wire).blocks, 16);
  }
}

TEST(ConversionShape, SplitsFewRowsIntoPartsOfAtLeastOnePiece) {
  EXPECT_EQ(shape_of(1, 7168, Wire::mxfp8_e4m3).parts, 14);
  EXPECT_EQ(shape_of(1, 7168, Wire::int8_token).parts, 14);
  EXPECT_EQ(shape_of(1, 1, Wire::int8_token).parts, 1);
  EXPECT_EQ(shape_of(0, 513, Wire::nvfp4).parts, 2);
}

TEST(ConversionShape, ReadsARowOnceAWarpForItsScaleWhileWarpsAreIdleOnly) {
  // 256 warps: two for each of 128 tokens. Without a scale of whole rows, four times as many.
  EXPECT_EQ(shape_of(128, 7168, Wire::int8_token).parts, 2);
  EXPECT_EQ(shape_of(128, 7168, Wire::nvfp4).parts, 2);
  EXPECT_EQ(shape_of(128, 7168, Wire::mxfp8_e4m3).parts, 8);
}

TEST(ConversionShape, HasNoMorePartsThanPieces) {
  for (const std::int64_t tokens : {1, 3, 50, 1000}) {
    for (const std::int64_t hidden : {1, 512, 513, 7168, 10000}) {
      const std::int64_t pieces = (hidden + 511) / 512;
      const std::int64_t parts = shape_of(tokens, hidden, Wire::e5m2_block128).parts;
      EXPECT_GE(parts, 1);
      EXPECT_LE(parts, pieces);
    }
  }
}

}  // namespace
}  // namespace wherry::kernels::cuda
