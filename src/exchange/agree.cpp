// The ranks of a group compare their configurations.
#include <algorithm>
#include <span>
#include <string>
#include <vector>

#include "exchange/config.hpp"
#include "support/check.hpp"

namespace wherry {

namespace {

std::string serialise(const ExchangeConfig& config, int ranks) {
  std::string text;
  for (const auto& [field, value] : config.describe(ranks))
    text += fmt::format("{}={}\n", field, value);
  return text;
}

std::vector<std::string> lines(const Group::Bytes& bytes) {
  std::vector<std::string> result(1);
  for (const std::byte byte : bytes) {
    const char c = static_cast<char>(byte);
    if (c == '\n') {
      result.emplace_back();
    } else {
      result.back() += c;
    }
  }
  result.pop_back();
  return result;
}

}  // namespace

void agree(const Group& group, Device device, const ExchangeConfig& config) {
  // A configuration that is wrong by itself is not described; its rank says so with an empty text.
  std::string mine;
  std::string problem;
  try {
    check_config(config, group.rank(), group.size());
    if (device.kind == Device::Kind::cpu) static_cast<void>(kernels::find(config.kernels));
    mine = fmt::format("device={}\n{}", name(device.kind), serialise(config, group.size()));
  } catch (const Error& error) {
    problem = error.message();
  }
  const auto all = group.allgather(std::as_bytes(std::span(mine)));
  if (!problem.empty())
    throw Error(ErrorCode::bad_argument, {Stage::startup, group.rank(), -1}, problem);
  for (std::size_t peer = 0; peer < all.size(); ++peer) {
    WHERRY_CHECK(!all[peer].empty(), ErrorCode::bad_argument,
                 (Error::Where{Stage::startup, group.rank(), static_cast<int>(peer)}),
                 "rank {} has an illegal configuration; its own error says which field", peer);
  }
  const std::vector<std::string> first = lines(all[0]);
  for (std::size_t peer = 1; peer < all.size(); ++peer) {
    const std::vector<std::string> other = lines(all[peer]);
    for (std::size_t i = 0; i < std::min(first.size(), other.size()); ++i) {
      if (first[i] == other[i]) continue;
      const std::size_t split = first[i].find('=') + 1;
      throw Error(
          ErrorCode::config_mismatch, {Stage::startup, group.rank(), static_cast<int>(peer)},
          fmt::format("{} is {} on rank 0 and {} on rank {}", first[i].substr(0, split - 1),
                      first[i].substr(split), other[i].substr(other[i].find('=') + 1), peer));
    }
  }
}

}  // namespace wherry
