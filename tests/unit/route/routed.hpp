// route() into vectors, for tests.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "wherry/error.hpp"
#include "wherry/router.hpp"

struct Routed {
  std::vector<std::int32_t> ids;
  std::vector<float> weights;
};

inline Routed routed(const wherry::RouterConfig& config, const wherry::RouterInput& input) {
  const auto entries = static_cast<std::size_t>(input.tokens * config.topk);
  Routed out{std::vector<std::int32_t>(entries, -7), std::vector<float>(entries, -7.0F)};
  wherry::route(config, input, out.ids, out.weights);
  return out;
}

// The message of the Error that `call` throws with the expected code and stage route.
template <typename Call>
std::string message_of(wherry::ErrorCode expected, const Call& call) {
  try {
    call();
  } catch (const wherry::Error& error) {
    if (error.code() != expected) return "wrong code: " + std::string(error.what());
    if (error.stage() != wherry::Stage::route) return "wrong stage: " + std::string(error.what());
    return error.message();
  }
  return "nothing was thrown";
}
