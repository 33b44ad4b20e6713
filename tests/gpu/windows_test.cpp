// How windows are shared between processes: each way moves the same bits, and one that is asked for is the
// one that is used.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <stdexcept>

#include "gpu/twin.hpp"
#include "support/devices.hpp"

namespace wherry::test {
namespace {

const Batch kBatch = make_batch(150, 3, 13, 4, 512, 7, 0.1);

class Windows : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override { setenv("WHERRY_CUDA_WINDOWS", GetParam(), 1); }
  void TearDown() override { unsetenv("WHERRY_CUDA_WINDOWS"); }
};

TEST_P(Windows, OfProcessesAreOfTheKindThatIsAskedFor) {
  const std::string asked = GetParam();
  const std::string kind = asked == "ipc" ? "CUDA IPC" : "virtual memory";
  on_processes(3, [&](Group& group, int ordinal, cudaStream_t stream) {
    for (const Layout layout : {Layout::grouped, Layout::tokens, Layout::slots}) {
      const Reduction reduction =
          layout == Layout::slots ? Reduction::by_token : Reduction::by_rank;
      Case test{.config = config_of(kBatch, layout, reduction), .batch = kBatch};
      run_twin(group, ordinal, stream, test);
      const Exchange exchange(group, Device::cuda(ordinal), test.config);
      if (exchange.fabric() == "cuda_peer, " + kind) continue;
      // A GPU that has none says why, and only then.
      if (asked.empty() && !find_devices().found[0].no_virtual_memory.empty()) continue;
      throw std::runtime_error("windows of " + std::string(exchange.fabric()));
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Kinds, Windows, testing::Values("", "virtual_memory", "ipc"),
                         [](const auto& each) {
                           const std::string kind = each.param;
                           return kind.empty() ? std::string("best") : kind;
                         });

TEST(WindowsOfOneProcess, ArePointers) {
  on_threads(2, [&](Group& group, int ordinal, cudaStream_t /*stream*/) {
    const Exchange exchange(group, Device::cuda(ordinal),
                            config_of(kBatch, Layout::grouped, Reduction::by_rank));
    EXPECT_EQ(exchange.fabric(), "cuda_peer, pointers");
  });
}

TEST(WindowsOfAnUnknownKind, AreRefusedOnEveryRank) {
  setenv("WHERRY_CUDA_WINDOWS", "magic", 1);
  on_threads(2, [&](Group& group, int ordinal, cudaStream_t /*stream*/) {
    try {
      const Exchange exchange(group, Device::cuda(ordinal),
                              config_of(kBatch, Layout::grouped, Reduction::by_rank));
      ADD_FAILURE() << "made";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::bad_argument);
      EXPECT_THAT(error.message(), testing::HasSubstr("'magic'; it may be virtual_memory or ipc"));
    }
  });
  unsetenv("WHERRY_CUDA_WINDOWS");
}

}  // namespace
}  // namespace wherry::test
