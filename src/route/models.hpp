// The shapes of public MoE models: presets of the command line, the benchmarks and the tests.
#pragma once

#include <span>
#include <string_view>

#include "wherry/router.hpp"

namespace wherry {

struct Model {
  std::string_view name;
  int hidden;         // elements of a token
  int expert_hidden;  // elements between the two halves of an expert's MLP
  int experts;
  int topk;
  int groups = 1;
  int groups_kept = 1;
  int shared = 0;  // experts that every token visits, at home, beside the routed ones
  Score score = Score::softmax;
  bool bias = false;
  bool normalize = false;
  float scale = 1.0F;
  int hash_layers = 0;  // the first layers, routed by a hash of the token id
  bool weight_on_input = false;
  bool verified = false;  // compared with the model's own published configuration
};

[[nodiscard]] std::span<const Model> models() noexcept;

// Throws bad_argument listing every name.
[[nodiscard]] const Model& find_model(std::string_view name);

// The router of one of the model's layers; hash_layer asks for one of the first `hash_layers`.
// Throws bad_argument if it has none.
[[nodiscard]] RouterConfig router_config(const Model& model, bool hash_layer = false);

}  // namespace wherry
