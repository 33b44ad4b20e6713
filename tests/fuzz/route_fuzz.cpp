// Any router and any logits (NaN, infinities, wrong lengths) end in a typed error or in a routing that
// plan() takes: experts in range, each once where the scores choose, and weights that are numbers.
#include <cmath>
#include <set>
#include <stdexcept>
#include <vector>

#include "fuzz/numbers.hpp"
#include "wherry/error.hpp"
#include "wherry/router.hpp"

namespace wherry::test {
namespace {

constexpr int kMostExperts = 64;

RouterConfig any_config(Bytes& bytes) {
  RouterConfig config;
  config.experts = static_cast<int>(bytes.between(-1, kMostExperts));
  config.topk = static_cast<int>(bytes.between(-1, 12));
  config.score = static_cast<Score>(bytes.between(0, 3));
  config.selection = static_cast<Selection>(bytes.between(0, 2));
  config.groups = static_cast<int>(bytes.between(0, 8));
  config.groups_kept = static_cast<int>(bytes.between(0, 8));
  config.bias = bytes.between(0, 1) == 1;
  config.normalize = bytes.between(0, 1) == 1;
  config.scale = bytes.between(0, 3) == 0 ? bytes.take<float>() : 2.5F;
  config.weight_on_input = bytes.between(0, 7) == 0;
  return config;
}

// As many as asked for, but for one in sixteen inputs.
std::vector<float> any_floats(Bytes& bytes, bool wanted, std::int64_t count) {
  std::vector<float> values;
  if (bytes.between(0, 15) == 0) count += bytes.between(-3, 3);
  for (std::int64_t i = 0; wanted && i < count; ++i) {
    const bool plain = bytes.between(0, 15) != 0;
    values.push_back(plain ? static_cast<float>(bytes.between(-100, 100)) / 8.0F
                           : bytes.take<float>());
  }
  return values;
}

template <typename T>
std::vector<T> any_integers(Bytes& bytes, bool wanted, std::int64_t count, int end) {
  std::vector<T> values;
  if (bytes.between(0, 15) == 0) count += bytes.between(-3, 3);
  for (std::int64_t i = 0; wanted && i < count; ++i) {
    const bool good = bytes.between(0, 31) != 0;
    values.push_back(good ? static_cast<T>(bytes.between(0, std::max(end, 1) - 1))
                          : bytes.take<T>());
  }
  return values;
}

void require(bool good, const char* what) {
  if (!good) throw std::runtime_error(what);
}

void check(const RouterConfig& config, const Routing& routing) {
  for (std::int64_t token = 0; token < routing.tokens; ++token) {
    std::set<std::int64_t> chosen;
    for (int k = 0; k < routing.topk; ++k) {
      const std::int64_t id = routing.id(token, k);
      require(id >= -1 && id < config.experts, "an expert out of range");
      require(!std::isnan(routing.weight(token, k)), "a weight that is no number");
      if (config.selection != Selection::topk) continue;
      require(id >= 0 && chosen.insert(id).second, "an expert chosen twice, or none");
    }
  }
}

}  // namespace

void run(Bytes bytes) {
  const RouterConfig config = any_config(bytes);
  const std::int64_t tokens =
      bytes.between(0, 63) == 0 ? bytes.take<std::int64_t>() : bytes.between(0, 6);
  const std::int64_t rows = std::clamp<std::int64_t>(tokens, 0, 6);
  const std::int64_t choices = rows * std::max(config.topk, 0);
  const bool given = config.selection == Selection::given;
  const bool hash = config.selection == Selection::hash;
  const bool weighed = given && bytes.between(0, 1) == 1;
  const auto logits = any_floats(bytes, !weighed, rows * std::max(config.experts, 0));
  const auto bias = any_floats(bytes, config.bias, std::max(config.experts, 0));
  const auto weights = any_floats(bytes, weighed, choices);
  const auto table = any_integers<std::int32_t>(bytes, hash && bytes.between(0, 1) == 1,
                                                8 * std::max(config.topk, 0), config.experts);
  const auto token_ids = any_integers<std::int64_t>(bytes, hash, rows, 8);
  const auto ids = any_integers<std::int32_t>(bytes, given, choices, config.experts);
  std::vector<std::int32_t> out_ids(static_cast<std::size_t>(choices));
  std::vector<float> out_weights(static_cast<std::size_t>(choices));
  RouterInput input;
  input.tokens = tokens;
  input.logits = logits;
  input.bias = bias;
  input.token_ids = token_ids;
  input.hash_table = table;
  input.ids = ids;
  input.weights = weights;
  try {
    const Routing routing = route(config, input, out_ids, out_weights);
    // Weights of the caller go through as they are, numbers or not.
    if (!weighed) check(config, routing);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::bad_argument && error.code() != ErrorCode::bad_routing) throw;
  }
}

}  // namespace wherry::test
