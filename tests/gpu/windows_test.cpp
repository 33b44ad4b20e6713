// How windows are shared between processes: each way moves the same bits, and one that is asked for is the
// one that is used.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <stdexcept>

#include "gpu/captured.hpp"
#include "support/devices.hpp"

namespace wherry::test {
namespace {

const Batch kBatch = make_batch(150, 3, 13, 4, 512, 7, 0.1);

class Windows : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override { setenv("WHERRY_CUDA_WINDOWS", GetParam(), 1); }
  void TearDown() override { unsetenv("WHERRY_CUDA_WINDOWS"); }
};

// What this machine cannot do is said on every rank.
void expect_unsupported(const Group& group, int ordinal, const std::string& why) {
  try {
    const Exchange exchange(group, Device::cuda(ordinal),
                            config_of(kBatch, Layout::grouped, Reduction::by_rank));
    throw std::runtime_error("windows of what this machine has not");
  } catch (const Error& error) {
    if (error.code() == ErrorCode::unsupported && error.message() == why) return;
    throw;
  }
}

TEST_P(Windows, OfProcessesAreOfTheKindThatIsAskedFor) {
  const std::string asked = GetParam();
  const std::string kind = asked == "ipc"              ? "CUDA IPC"
                           : asked == "fabric_handles" ? "fabric handles"
                                                       : "virtual memory";
  on_processes(3, [&](Group& group, int ordinal, cudaStream_t stream) {
    const std::string none = asked == "fabric_handles" ? no_fabric_handles(0) : "";
    if (!none.empty()) return expect_unsupported(group, ordinal, none);
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

INSTANTIATE_TEST_SUITE_P(Kinds, Windows,
                         testing::Values("", "virtual_memory", "fabric_handles", "ipc"),
                         [](const auto& each) {
                           const std::string kind = each.param;
                           return kind.empty() ? std::string("best") : kind;
                         });

// Memory of the caller, inside a larger allocation.
TEST(WindowsInMemoryOfTheCaller, AreSharedAsTheyAre) {
  const ExchangeConfig config = config_of(kBatch, Layout::grouped, Reduction::by_rank);
  const auto body = [&](Group& group, int ordinal, cudaStream_t stream) {
    ExchangeConfig mine = config;
    mine.sum_at = SumAt::home;  // whatever lies between the GPUs
    const std::uint64_t bytes = mine.window_bytes(group.size());
    Buffer arena(3 * bytes);
    const auto offset = static_cast<std::ptrdiff_t>(bytes / 256 * 256);
    const std::span<std::byte> memory(arena.as<std::byte>() + offset, bytes);
    Case test{.config = mine, .batch = kBatch};
    {
      CapturedSteps steps(group, Exchange(group, Device::cuda(ordinal), mine, memory), stream,
                          test);
      Exchange cpu(group, mine);
      Plan plan = cpu.make_plan();
      steps.load(0);
      steps.issue();
      steps.wait();
      const auto expected = cpu_sums(cpu, plan, input_of(test, group.rank(), 0));
      if (steps.sums(0, expected.size()) != expected) throw std::runtime_error("wrong sums");
      const auto* at = static_cast<const std::byte*>(steps.results());
      if (at < memory.data() || at >= memory.data() + memory.size()) {
        throw std::runtime_error("the window is elsewhere");
      }
    }
    for (const auto& [wrong, sentence] :
         {std::pair{memory.first(bytes - 1), "bytes; the window takes"},
          std::pair{std::span(arena.as<std::byte>() + 16, bytes), "not aligned to 256 bytes"}}) {
      try {
        const Exchange exchange(group, Device::cuda(ordinal), mine, wrong);
        throw std::runtime_error("made of wrong memory");
      } catch (const Error& error) {
        if (error.code() != ErrorCode::bad_argument ||
            error.message().find(sentence) == std::string::npos) {
          throw;
        }
      }
    }
    group.barrier();
  };
  EXPECT_NO_THROW(on_processes(3, body));
  EXPECT_NO_THROW(on_threads(3, body));
}

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
      EXPECT_THAT(error.message(),
                  testing::HasSubstr("'magic'; it may be virtual_memory, fabric_handles or ipc"));
    }
  });
  unsetenv("WHERRY_CUDA_WINDOWS");
}

}  // namespace
}  // namespace wherry::test
