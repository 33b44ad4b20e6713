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

TEST(CombineShape, HasNoEmptyPart) {
  for (const int num_sms : {1, 16, 32, 128}) {
    for (std::int64_t tokens = 1; tokens < 300; ++tokens) {
      for (const std::uint64_t row_bytes : {2U, 16U, 528U, 14336U, 25600U, 32768U}) {
        CombineJob job;
        job.tokens = tokens;
        job.row_bytes = row_bytes;
        job.num_sms = num_sms;
        const auto parts = static_cast<std::uint64_t>(choose_combine_shape(job).parts);
        const std::uint64_t vectors = (row_bytes + 15) / 16;
        ASSERT_GE(parts, 1U);
        ASSERT_LT((parts - 1) * ((vectors + parts - 1) / parts), vectors)
            << parts << " parts of " << vectors << " vectors";
      }
    }
  }
}

DispatchJob e4m3_job(std::int64_t tokens, std::uint64_t hidden, int num_sms) {
  DispatchJob job;
  job.tokens = tokens;
  job.row_bytes = hidden;
  job.num_sms = num_sms;
  job.bulk = true;
  job.link = true;
  return job;
}

TEST(E4m3Shape, TakesBulkCopiesOverALinkForManyTokensOnFewMultiprocessors) {
  EXPECT_EQ(choose_e4m3_shape(e4m3_job(4096, 7168, 16)).pieces, 4);
  EXPECT_EQ(choose_e4m3_shape(e4m3_job(4096, 7168, 16)).blocks, 16);
  EXPECT_EQ(choose_e4m3_shape(e4m3_job(4096, 7168, 64)).pieces, 0);
  EXPECT_EQ(choose_e4m3_shape(e4m3_job(127, 7168, 16)).pieces, 0);
  DispatchJob job = e4m3_job(4096, 7168, 16);
  job.link = false;
  EXPECT_EQ(choose_e4m3_shape(job).pieces, 0);
  job.link = true;
  job.bulk = false;
  EXPECT_EQ(choose_e4m3_shape(job).pieces, 0);
}

TEST(E4m3Shape, HasPiecesOfAtMostFourStepsAndNoneEmpty) {
  for (std::uint64_t hidden = 16; hidden <= 20'000; hidden += 16) {
    const E4m3Shape shape = choose_e4m3_shape(e4m3_job(4096, hidden, 8));
    const auto steps = static_cast<int>((hidden + 511) / 512);
    ASSERT_LE(shape.piece_steps, 4) << hidden;
    ASSERT_GE(shape.pieces * shape.piece_steps, steps) << hidden;
    ASSERT_LT((shape.pieces - 1) * shape.piece_steps, steps) << hidden;
  }
}

}  // namespace
}  // namespace wherry::kernels::cuda
