// Stage 1, route: from the logits of the gate to expert ids and weights, capacity and dropping, and
// the losses that keep experts balanced. Pure functions on host memory: nothing here talks to
// another rank, keeps state, or owns what the caller passes. All tensors are row-major.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "wherry/types.hpp"

namespace wherry {

// How a logit becomes a score s.
enum class Score : std::uint8_t {
  softmax,       // over all experts (Mixtral, Qwen3, Switch)
  sigmoid,       // DeepSeek-V3, Kimi-K2, GLM-4.5, Llama-4
  sqrtsoftplus,  // sqrt(log(1 + exp(x))) (DeepSeek-V4)
  topk_softmax,  // s is the logit itself; the weights are a softmax over the chosen (gpt-oss)
};
// Who decides which experts a token gets.
enum class Selection : std::uint8_t {
  topk,   // the scores: group-limited top-k
  hash,   // the token's id in the vocabulary (the first layers of DeepSeek-V4)
  given,  // the caller: already routed
};
[[nodiscard]] std::string_view name(Score score) noexcept;
[[nodiscard]] std::string_view name(Selection selection) noexcept;

// One layer's router. Use designated initialisers.
struct RouterConfig {
  int experts = 0;  // logical experts, >= 1
  int topk = 0;     // choices a token, >= 1; Selection::topk: <= experts in the kept groups
  Score score = Score::softmax;
  Selection selection = Selection::topk;
  int groups = 1;         // experts are split into this many groups of equal size
  int groups_kept = 1;    // groups a token may choose from, 1..groups
  bool bias = false;      // a selection bias is added to the scores that choose, not to the weights
  bool normalize = true;  // divide the weights of a token by their sum
  float scale = 1.0F;     // then multiply them by this
  bool weight_on_input = false;  // the weight belongs on the expert's input (needs topk 1)

  // Throws bad_argument naming the field, its value and what is allowed.
  void check() const;
  [[nodiscard]] bool operator==(const RouterConfig&) const = default;
};

}  // namespace wherry
