// The memory that rank processes share, seen from /proc.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <fstream>
#include <map>
#include <sstream>

#include "support/layer.hpp"

namespace wherry::test {
namespace {

struct Mapping {
  std::uintptr_t begin = 0;
  std::uintptr_t end = 0;
};

// Mappings of window memfds in this process, by inode; parts of one file are joined.
std::map<std::string, Mapping> window_mappings() {
  std::map<std::string, Mapping> result;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    if (line.find("memfd:wherry-window") == std::string::npos) continue;
    std::istringstream fields(line);
    std::string range, mode, offset, device, inode;
    fields >> range >> mode >> offset >> device >> inode;
    const std::uintptr_t begin = std::stoull(range, nullptr, 16);
    const std::uintptr_t end = std::stoull(range.substr(range.find('-') + 1), nullptr, 16);
    auto [at, fresh] = result.try_emplace(inode, Mapping{begin, end});
    if (!fresh) at->second = {std::min(at->second.begin, begin), std::max(at->second.end, end)};
  }
  return result;
}

TEST(Memory, WindowBytesIsTheSumOfTheMemfdsAndViewsLieInsideThisRanksWindow) {
  const Batch batch = make_batch(20, 3, 6, 2, 64, 71);
  for (const Layout layout : {Layout::grouped, Layout::tokens, Layout::slots}) {
    ExchangeConfig config = config_for(batch);
    config.layout = layout;
    config.reduction = std::nullopt;
    config.populate = true;
    EXPECT_NO_THROW(run_processes(3, [&](Group& group) {
      Exchange exchange(group, config);
      const auto mappings = window_mappings();
      expect(mappings.size() == 3, fmt::format("{} windows are mapped", mappings.size()));
      for (const auto& [inode, mapping] : mappings) {
        expect(mapping.end - mapping.begin == config.window_bytes(3),
               fmt::format("a window has {} bytes, window_bytes() says {}",
                           mapping.end - mapping.begin, config.window_bytes(3)));
      }
      Plan plan = exchange.make_plan();
      exchange.plan(batch.routing_of(group.rank()), plan);
      std::vector<Bf16> x = tokens_of<Bf16>(batch, group.rank());
      std::vector<Bf16> out(x.size());
      const Received r = exchange.dispatch(plan, view(x, 64));
      const TensorView y = exchange.combine_input(plan);
      const auto inside = [&](const TensorView& tensor) {
        const auto begin = reinterpret_cast<std::uintptr_t>(tensor.data);
        const auto end = begin + static_cast<std::uintptr_t>(tensor.rows * tensor.pitch());
        return std::any_of(mappings.begin(), mappings.end(), [&](const auto& mapping) {
          return begin >= mapping.second.begin && end <= mapping.second.end;
        });
      };
      expect(inside(r.rows) && inside(y), "a view lies outside the windows");
      apply_experts<Bf16>(exchange, r, y);
      exchange.combine(plan, y, view(out, 64));
      expect_dense<Bf16>(exchange, batch, out);
    }));
  }
}

}  // namespace
}  // namespace wherry::test
