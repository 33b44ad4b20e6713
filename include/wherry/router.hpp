// Stage 1, route: from the logits of the gate to expert ids and weights, capacity and dropping, and
// the losses that keep experts balanced. Pure functions on host memory: nothing here talks to
// another rank, keeps state, or owns what the caller passes; any number of threads may call them.
// All tensors are row-major. A span of the wrong length is an error that names both lengths.
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

// What route() reads. Fields that the configuration does not ask for must stay empty.
struct RouterInput {
  std::int64_t tokens = 0;             // 0 is legal
  std::span<const float> logits = {};  // [tokens, experts]; finite, or -inf for a score of 0
  std::span<const float> bias = {};    // [experts]; RouterConfig::bias
  // Selection::hash. Without a table, hash_expert() decides.
  std::span<const std::int64_t> token_ids = {};   // [tokens], each >= 0
  std::span<const std::int32_t> hash_table = {};  // [vocabulary, topk], each in [-1, experts)
  // Selection::given: ids, and either logits (from which the weights follow) or the weights.
  std::span<const std::int32_t> ids = {};  // [tokens, topk], each in [-1, experts)
  std::span<const float> weights = {};     // [tokens, topk]
};

// Chooses experts and weighs them: fills ids [tokens, topk] and weights [tokens, topk], and returns
// a view of both for Exchange::plan(). Local, blocking; allocates once a call, never per token.
//
// Selection::topk, in fp32: s = score(logits), c = s + bias. A group's score is the sum of its two
// largest c; the `groups_kept` best groups stay, every c elsewhere is -inf; the topk largest c are
// chosen, best first. Exact ties go to the lowest index, of groups and of experts. With neither
// bias nor groups the logits themselves choose, which is the same but that only equal logits tie.
// Selection::hash: the row of hash_table for the token's id; an expert may come twice, both weights
// count.
//
// Weights are computed in fp64 and rounded once: w = s of the chosen, without the bias;
// `normalize` divides by their sum (+ 1e-20 unless softmax), then `scale` multiplies. topk_softmax:
// softmax over the logits of the chosen, times scale. An entry -1 gets weight 0.
//
// With `weight_on_input` the weights belong on the rows before the experts: multiply x by them, or
// send them as row_scalars. The returned view then has no weights (combine multiplies by 1).
//
// The output may be the memory of the `given` input. Throws bad_argument (configuration, lengths;
// a logit that is NaN or +inf, or a token whose logits are all -inf, naming token and expert; a
// bias that is not finite) and bad_routing (an id out of range, naming token and choice). After an
// error the contents of ids and weights are unspecified.
// Source: the models' published inference code; DeepSeek-V3 report, section 2.1.2.
Routing route(const RouterConfig& config, const RouterInput& input, std::span<std::int32_t> ids,
              std::span<float> weights);

// The expert of choice k of a token in a hash-routed layer without a table: a fixed mix of
// (token_id, k), the same on every rank and machine.
[[nodiscard]] std::int32_t hash_expert(std::int64_t token_id, int k, int experts) noexcept;

// ---- Capacity --------------------------------------------------------------------------------

enum class CapacityFormula : std::uint8_t {
  deepspeed,  // ceil(T/E * factor*topk), in fp32
  megatron,   // ceil(T*topk/E * factor), in fp64
};
// Which entries of an expert that got too many stay.
enum class DropPolicy : std::uint8_t {
  probs,     // the heaviest weights; on ties the earliest token
  position,  // the earliest tokens
};
[[nodiscard]] std::string_view name(CapacityFormula formula) noexcept;
[[nodiscard]] std::string_view name(DropPolicy policy) noexcept;

struct CapacityConfig {
  CapacityFormula formula = CapacityFormula::deepspeed;
  double factor = 1.0;       // > 0, finite
  std::int64_t minimum = 0;  // never fewer entries an expert than this, >= 0
};

// Entries an expert accepts, for `tokens` tokens. Where the result sizes a buffer that ranks share,
// pass the same number of tokens on all of them (the largest, or the sum). Throws bad_argument.
// Source: DeepSpeed deepspeed/moe/sharded_moe.py, _capacity; Megatron-LM
// megatron/core/transformer/moe/moe_utils.py, get_capacity. They differ in the last bit: the former
// multiplies fp32 tensors, the latter Python floats.
[[nodiscard]] std::int64_t expert_capacity(const RouterConfig& config, std::int64_t tokens,
                                           const CapacityConfig& capacity);

// Makes room: of each expert with more than `capacity` entries, those that `policy` does not keep
// become id -1, weight 0. ids and weights [tokens, topk], changed in place; dropped [experts] is
// set to the number dropped of each expert (may be empty). Returns how many were dropped. `probs`
// compares the weights as they are: Megatron's are normalised before, DeepSpeed's after (route with
// normalize = false, drop, then divide). Nothing is renormalised here. Local; allocates once a
// call. Throws bad_argument (capacity < 0, lengths, a NaN weight under `probs`) and bad_routing (an
// id out of range).
std::int64_t drop_over_capacity(const RouterConfig& config, std::int64_t capacity,
                                DropPolicy policy, std::span<std::int32_t> ids,
                                std::span<float> weights, std::span<std::int64_t> dropped = {});

// ---- Balance ---------------------------------------------------------------------------------

// Adds to counts [experts] how many entries of ids [any number of choices] name each expert.
// Throws bad_argument (lengths) and bad_routing (an id out of range).
void count_experts(const RouterConfig& config, std::span<const std::int32_t> ids,
                   std::span<std::int64_t> counts);

// What the balance losses read. p_ti, the probability of expert i for token t, is a softmax over
// the logits for softmax and topk_softmax, and s_ti / (sum_j s_tj + 1e-20) for the others. ids are
// the choices before any dropping; the gradient does not flow through them.
struct BalanceInput {
  std::int64_t tokens = 0;                 // T
  std::span<const float> logits = {};      // [tokens, experts], as in RouterInput
  std::span<const std::int32_t> ids = {};  // [tokens, topk], each in [-1, experts)
  double coefficient = 1.0;                // multiplies loss and gradient, finite
};
// Each returns the loss, summed in fp64, and adds its gradient to grad_logits [tokens, experts],
// fp32 (may be empty: no gradient). 0 tokens give 0. Local; allocates once a call. They throw
// bad_argument and bad_routing as route() does; grad_logits is then unspecified.

// coefficient * E * sum_i f_i P_i: f_i the fraction of tokens whose first choice is i, P_i the mean
// p_ti. 1 when balanced. Source: Switch Transformer (arXiv:2101.03961), equations 4 to 6; GShard.
double first_choice_loss(const RouterConfig& config, const BalanceInput& input,
                         std::span<float> grad_logits = {});

// coefficient * E / (K T^2) * sum_i n_i sum_t p_ti: n_i the entries that name i. `coefficient` when
// balanced. Source: Megatron-LM, switch_load_balancing_loss_func.
double topk_loss(const RouterConfig& config, const BalanceInput& input,
                 std::span<float> grad_logits = {});

// topk_loss of every sequence by itself, then the mean over the sequences that hold a token.
// Sequence q is the tokens [sequence_begin[q], sequence_begin[q+1]); ascending, from 0 to tokens.
// Source: DeepSeek-V3 report (arXiv:2412.19437), equations 17 to 20.
double sequence_loss(const RouterConfig& config, const BalanceInput& input,
                     std::span<const std::int64_t> sequence_begin,
                     std::span<float> grad_logits = {});

// topk_loss with the counts of the global batch: coefficient * E / (K T_global T) * sum_i
// n_i,global sum_t p_ti. The mean over ranks, weighted by their T, is topk_loss of the whole batch.
// global_counts [experts] and global_tokens are sums over the ranks; input.ids may be empty.
// Source: Qwen, "Demons in the Detail" (arXiv:2501.11873), equation 5.
double global_batch_loss(const RouterConfig& config, const BalanceInput& input,
                         std::span<const std::int64_t> global_counts, std::int64_t global_tokens,
                         std::span<float> grad_logits = {});

// coefficient * mean_t(log(sum_i exp(logit_ti))^2), whatever the score; input.ids may be empty.
// Source: ST-MoE (arXiv:2202.08906), equation 5.
double z_loss(const RouterConfig& config, const BalanceInput& input,
              std::span<float> grad_logits = {});

// Balance without a loss, once a global step: bias_i += rate * sign(mean(counts) - counts_i), fp32;
// the sign is exact. counts [experts] summed over every data-parallel rank, each >= 0. Throws
// bad_argument. Source: arXiv:2408.15664, algorithm 1; DeepSeek-V3 report, section 2.1.2.
void update_bias(std::span<const std::int64_t> counts, float rate, std::span<float> bias);

}  // namespace wherry
