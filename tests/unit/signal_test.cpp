// Signals that a sender's blocks add part by part.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "kernels/layout.hpp"

namespace wherry::layout {
namespace {

constexpr std::uint32_t kMostCount = (1U << 24) - 1;

// Adds the parts in the order of `blocks`; what block 0 has read of the word is from before its `read_after`-th.
void add_parts(std::uint64_t before, std::uint64_t signal, const std::vector<std::uint32_t>& blocks,
               std::size_t read_after) {
  const auto count = static_cast<std::uint32_t>(blocks.size());
  std::uint64_t word = before;
  std::uint64_t seen = before;
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    if (i == read_after) seen = word;
    ASSERT_EQ(signal_epoch(word), signal_epoch(before)) << i << " of " << count << " parts";
    if (blocks[i] == 0 && i < read_after) seen = word;
    word += signal_part(seen, signal, blocks[i], count);
  }
  ASSERT_EQ(word, signal) << count << " parts";
}

TEST(SignalParts, MakeTheSignalInAnyOrder) {
  std::mt19937 random(11);
  for (std::uint32_t count = 1; count <= kMaxSignalParts; ++count) {
    std::vector<std::uint32_t> blocks(count);
    for (std::uint32_t i = 0; i < count; ++i) blocks[i] = i;
    for (const std::uint32_t old : {0U, 1U, kMostCount}) {
      for (const std::uint32_t now : {0U, 1U, kMostCount}) {
        for (const std::uint32_t epoch : {1U, 2U, 0x80000000U, 0xFFFFFFFFU}) {
          std::shuffle(blocks.begin(), blocks.end(), random);
          add_parts(pack_signal(epoch - 1, old), pack_signal(epoch, now), blocks, random() % count);
        }
      }
    }
  }
}

TEST(SignalParts, OfOneBlockAreTheSignal) {
  const std::uint64_t before = pack_signal(7, 9);
  EXPECT_EQ(before + signal_part(before, pack_signal(8, 3), 0, 1), pack_signal(8, 3));
}

}  // namespace
}  // namespace wherry::layout
