// How launches on a GPU are shaped: pure functions, which need none.
#include <gtest/gtest.h>

#include <algorithm>

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

TEST(RowParts, AreWholeStepsOfWhichNoneIsEmpty) {
  for (const std::uint32_t warps : {1U, 16U, 512U, 4224U}) {
    for (std::uint32_t rows = 0; rows < 300; ++rows) {
      for (const std::uint32_t units : {1U, 33U, 896U, 1600U, 2048U}) {
        const auto [parts, each] = parts_of_row(rows, units, warps);
        ASSERT_GE(parts, 1U);
        ASSERT_EQ(each % kRowStepUnits, 0U);
        ASSERT_GE(parts * each, units);
        ASSERT_LT((parts - 1) * each, units);
        if (rows <= warps) {
          ASSERT_LE(rows * parts, warps) << rows << " rows of " << units << " units";
        }
      }
    }
  }
}

TEST(RowParts, AreOneWhereRowsAreNoFewerThanWarps) {
  EXPECT_EQ(parts_of_row(512, 896, 512).count, 1U);
  EXPECT_EQ(parts_of_row(4096, 896, 512).count, 1U);
}

TEST(RowParts, AreAsManyAsThereAreWarpsFor) {
  EXPECT_EQ(parts_of_row(126, 896, 2048).count, 14U);  // of two steps
  EXPECT_EQ(parts_of_row(1, 896, 2048).count, 28U);
}

CombineJob bulk_job(std::uint64_t terms, std::uint64_t row_bytes) {
  CombineJob job;
  job.row_bytes = row_bytes;
  job.num_sms = 8;
  job.bulk = true;
  job.most_terms = terms;
  return job;
}

// What combine_recv_bulk relies on.
TEST(CombineShape, HasRoomForTwoPiecesOfEveryTerm) {
  constexpr std::uint64_t kSharedBytes = 224 * 1024;
  for (std::uint64_t terms = 1; terms <= 32; ++terms) {
    for (const std::uint64_t row_bytes :
         {2U, 16U, 528U, 1040U, 2064U, 8192U, 14336U, 25600U, 1048576U}) {
      const CombineShape shape = choose_combine_shape(bulk_job(terms, row_bytes));
      const std::uint64_t bytes = shape.piece_bytes;
      const auto slots = static_cast<std::uint64_t>(shape.slots);
      const auto warps = static_cast<std::uint64_t>(shape.threads) / 32;
      ASSERT_GE(warps, 1U);
      ASSERT_LE(warps, 16U);
      ASSERT_GE(bytes, 16U);
      ASSERT_EQ(bytes % 16, 0U);
      ASSERT_LE(slots, 64U);
      ASSERT_GE(slots, 2 * terms) << terms << " rows of " << row_bytes << " bytes";
      ASSERT_LE(slots * bytes, kSharedBytes / warps);
    }
  }
}

TEST(CombineShape, HasMostOfSharedMemoryInFlight) {
  for (std::uint64_t terms = 1; terms <= 8; ++terms) {
    for (const std::uint64_t row_bytes : {1040U, 2064U, 4096U, 5760U, 8192U, 14336U, 32768U}) {
      const CombineShape shape = choose_combine_shape(bulk_job(terms, row_bytes));
      const std::uint64_t pieces = (row_bytes + shape.piece_bytes - 1) / shape.piece_bytes;
      const auto coming =
          std::min<std::uint64_t>(static_cast<std::uint64_t>(shape.slots) / terms, 8);
      const std::uint64_t in_flight =
          static_cast<std::uint64_t>(shape.threads) / 32 * coming * terms * row_bytes / pieces;
      EXPECT_GE(in_flight, 128U * 1024) << terms << " rows of " << row_bytes << " bytes";
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

// What dispatch_send_bulk relies on.
void expect_legal(const DispatchShape& shape, const DispatchJob& job) {
  constexpr std::uint64_t kSharedBytes = 224 * 1024;
  constexpr int kMaxPieces = 64;
  constexpr std::uint64_t kLanes = 32;  // items that a warp can know
  const auto warps = static_cast<std::uint64_t>(shape.warps);
  const auto stages = static_cast<std::uint64_t>(shape.stages);
  const std::uint64_t bytes = shape.piece_bytes;
  ASSERT_EQ(shape.blocks, job.num_sms);
  ASSERT_LE(warps, 16U);
  ASSERT_LE(shape.warps * shape.stages, kMaxPieces);
  ASSERT_GE(shape.stores_in_flight, 1);
  ASSERT_LE(shape.stores_in_flight, 4);
  // A piece is loaded again behind its stores, and the one that comes next is there.
  ASSERT_GE(shape.stages, shape.stores_in_flight + 2);
  ASSERT_LE(warps * stages * bytes, kSharedBytes);
  ASSERT_GE(bytes, 16U);
  ASSERT_EQ(bytes % 16, 0U);
  const std::uint64_t pieces = (job.row_bytes + bytes - 1) / bytes;
  ASSERT_LT((pieces - 1) * bytes, job.row_bytes);
  const std::uint64_t of_item = shape.whole_rows ? pieces : 1;
  ASSERT_LT((stages + of_item - 1) / of_item + 1, kLanes);
  if (shape.whole_rows) {
    ASSERT_GE(static_cast<std::uint64_t>(job.tokens),
              16 * static_cast<std::uint64_t>(job.num_sms) * warps);
  }
}

TEST(DispatchShape, IsLegalForEveryJob) {
  for (const int num_sms : {1, 4, 5, 8, 16, 64, 132}) {
    for (const bool link : {false, true}) {
      for (const double copies : {1.0, 4.0, 8.0}) {
        for (const std::int64_t tokens : {0, 1, 40, 300, 4096, 100000}) {
          for (const std::uint64_t row_bytes : {16U, 528U, 2064U, 14336U, 32768U, 1048576U}) {
            const DispatchJob job{tokens, row_bytes, copies, num_sms, true, link};
            ASSERT_NO_FATAL_FAILURE(expect_legal(choose_dispatch_shape(job), job))
                << num_sms << " multiprocessors, link " << link << ", " << copies << " copies of "
                << tokens << " rows of " << row_bytes << " bytes";
          }
        }
      }
    }
  }
}

TEST(DispatchShape, TakesWholeRowsWhereAWarpGetsMany) {
  const auto takes_whole = [](std::int64_t tokens) {
    return choose_dispatch_shape({tokens, 14336, 2.0, 16, true, true}).whole_rows;
  };
  EXPECT_TRUE(takes_whole(4096));
  EXPECT_FALSE(takes_whole(1000));
  EXPECT_FALSE(takes_whole(1));
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
