#include "experts/expert_hidden.hpp"

#include <algorithm>
#include <bit>
#include <fstream>
#include <limits>

#include "support/check.hpp"

namespace wherry {
namespace {

// The number at the start of a file, or "no limit" (a cgroup's file says "max").
std::uint64_t read_number(const char* path) {
  std::ifstream file(path);
  std::uint64_t value = 0;
  return file >> value ? value : std::numeric_limits<std::uint64_t>::max();
}

double gigabytes(std::uint64_t bytes) { return static_cast<double>(bytes) * 1e-9; }

}  // namespace

std::uint64_t available_memory() {
  std::uint64_t available = std::numeric_limits<std::uint64_t>::max();
  std::ifstream meminfo("/proc/meminfo");
  for (std::string field, rest; meminfo >> field; std::getline(meminfo, rest)) {
    std::uint64_t kibibytes = 0;
    if (field == "MemAvailable:" && meminfo >> kibibytes) available = kibibytes * 1024;
  }
  const std::uint64_t limit = read_number("/sys/fs/cgroup/memory.max");
  const std::uint64_t used = read_number("/sys/fs/cgroup/memory.current");
  if (limit == std::numeric_limits<std::uint64_t>::max()) return available;
  return std::min(available, limit > used ? limit - used : 0);
}

std::uint64_t expert_weight_bytes(std::int64_t experts, std::int64_t hidden,
                                  std::int64_t expert_hidden, DType dtype) noexcept {
  return static_cast<std::uint64_t>(experts * 3 * hidden * expert_hidden * dtype_bytes(dtype));
}

ExpertHidden default_expert_hidden(const Model& model, DType dtype, std::uint64_t available) {
  constexpr std::uint64_t kMost = 4'000'000'000;
  const std::uint64_t limit = std::min(kMost, available / 2);
  const auto bytes = [&](std::int64_t expert_hidden) {
    return expert_weight_bytes(model.experts, model.hidden, expert_hidden, dtype);
  };
  auto value = static_cast<std::int64_t>(
      std::bit_floor(static_cast<std::uint32_t>(std::max(model.expert_hidden, 1))));
  while (value > 1 && bytes(value) > limit) value /= 2;
  const std::string limit_words =
      limit == kMost
          ? std::string("the default limit of 4 GB")
          : fmt::format("half of the {:.1f} GB of available memory", gigabytes(available));
  WHERRY_CHECK(bytes(value) <= limit, ErrorCode::out_of_memory,
               (Error::Where{Stage::experts, -1, -1}),
               "no memory for the weights: {} experts of hidden {} weigh {:.2f} GB even with an "
               "expert hidden of {}, more than {}; ask for fewer experts or a smaller hidden size",
               model.experts, model.hidden, gigabytes(bytes(value)), value, limit_words);
  return {value, fmt::format("expert hidden {} ({} has {}): the weights of all {} experts take "
                             "{:.1f} GB, within {}",
                             value, model.name, model.expert_hidden, model.experts,
                             gigabytes(bytes(value)), limit_words)};
}

}  // namespace wherry
