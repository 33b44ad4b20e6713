#include "route/models.hpp"

#include <algorithm>
#include <string>

#include "support/check.hpp"

namespace wherry {
namespace {

// clang-format off
constexpr Model kModels[] = {
  {.name = "deepseek-v3", .hidden = 7168, .expert_hidden = 2048, .experts = 256, .topk = 8,
   .groups = 8, .groups_kept = 4, .shared = 1, .score = Score::sigmoid, .bias = true,
   .normalize = true, .scale = 2.5F, .hash_layers = 0, .weight_on_input = false, .verified = true},
  {.name = "deepseek-v4-flash", .hidden = 4096, .expert_hidden = 2048, .experts = 256, .topk = 6,
   .groups = 1, .groups_kept = 1, .shared = 1, .score = Score::sqrtsoftplus, .bias = true,
   .normalize = true, .scale = 1.5F, .hash_layers = 3, .weight_on_input = false, .verified = true},
  {.name = "deepseek-v4-pro", .hidden = 7168, .expert_hidden = 3072, .experts = 384, .topk = 6,
   .groups = 1, .groups_kept = 1, .shared = 1, .score = Score::sqrtsoftplus, .bias = true,
   .normalize = true, .scale = 2.5F, .hash_layers = 3, .weight_on_input = false, .verified = false},
  {.name = "kimi-k2", .hidden = 7168, .expert_hidden = 2048, .experts = 384, .topk = 8,
   .groups = 1, .groups_kept = 1, .shared = 1, .score = Score::sigmoid, .bias = true,
   .normalize = true, .scale = 2.827F, .hash_layers = 0, .weight_on_input = false, .verified = true},
  {.name = "qwen3-235b-a22b", .hidden = 4096, .expert_hidden = 1536, .experts = 128, .topk = 8,
   .groups = 1, .groups_kept = 1, .shared = 0, .score = Score::softmax, .bias = false,
   .normalize = true, .scale = 1.0F, .hash_layers = 0, .weight_on_input = false, .verified = false},
  {.name = "qwen3-30b-a3b", .hidden = 2048, .expert_hidden = 768, .experts = 128, .topk = 8,
   .groups = 1, .groups_kept = 1, .shared = 0, .score = Score::softmax, .bias = false,
   .normalize = true, .scale = 1.0F, .hash_layers = 0, .weight_on_input = false, .verified = false},
  {.name = "mixtral-8x7b", .hidden = 4096, .expert_hidden = 14336, .experts = 8, .topk = 2,
   .groups = 1, .groups_kept = 1, .shared = 0, .score = Score::softmax, .bias = false,
   .normalize = true, .scale = 1.0F, .hash_layers = 0, .weight_on_input = false, .verified = false},
  {.name = "mixtral-8x22b", .hidden = 6144, .expert_hidden = 16384, .experts = 8, .topk = 2,
   .groups = 1, .groups_kept = 1, .shared = 0, .score = Score::softmax, .bias = false,
   .normalize = true, .scale = 1.0F, .hash_layers = 0, .weight_on_input = false, .verified = false},
  {.name = "gpt-oss-120b", .hidden = 2880, .expert_hidden = 2880, .experts = 128, .topk = 4,
   .groups = 1, .groups_kept = 1, .shared = 0, .score = Score::topk_softmax, .bias = false,
   .normalize = false, .scale = 1.0F, .hash_layers = 0, .weight_on_input = false, .verified = true},
  {.name = "gpt-oss-20b", .hidden = 2880, .expert_hidden = 2880, .experts = 32, .topk = 4,
   .groups = 1, .groups_kept = 1, .shared = 0, .score = Score::topk_softmax, .bias = false,
   .normalize = false, .scale = 1.0F, .hash_layers = 0, .weight_on_input = false, .verified = true},
  {.name = "llama4-maverick", .hidden = 5120, .expert_hidden = 8192, .experts = 128, .topk = 1,
   .groups = 1, .groups_kept = 1, .shared = 1, .score = Score::sigmoid, .bias = false,
   .normalize = false, .scale = 1.0F, .hash_layers = 0, .weight_on_input = true, .verified = false},
  {.name = "llama4-scout", .hidden = 5120, .expert_hidden = 8192, .experts = 16, .topk = 1,
   .groups = 1, .groups_kept = 1, .shared = 1, .score = Score::sigmoid, .bias = false,
   .normalize = false, .scale = 1.0F, .hash_layers = 0, .weight_on_input = true, .verified = false},
  {.name = "glm-4.5", .hidden = 5120, .expert_hidden = 1536, .experts = 160, .topk = 8,
   .groups = 1, .groups_kept = 1, .shared = 1, .score = Score::sigmoid, .bias = true,
   .normalize = true, .scale = 2.5F, .hash_layers = 0, .weight_on_input = false, .verified = true},
  {.name = "glm-4.5-air", .hidden = 4096, .expert_hidden = 1408, .experts = 128, .topk = 8,
   .groups = 1, .groups_kept = 1, .shared = 1, .score = Score::sigmoid, .bias = true,
   .normalize = true, .scale = 1.0F, .hash_layers = 0, .weight_on_input = false, .verified = false},
  {.name = "minimax-m2", .hidden = 3072, .expert_hidden = 1536, .experts = 256, .topk = 8,
   .groups = 1, .groups_kept = 1, .shared = 0, .score = Score::sigmoid, .bias = true,
   .normalize = true, .scale = 1.0F, .hash_layers = 0, .weight_on_input = false, .verified = true},
};
// clang-format on

}  // namespace

std::span<const Model> models() noexcept { return kModels; }

const Model& find_model(std::string_view name) {
  const auto* const found = std::ranges::find(kModels, name, &Model::name);
  if (found == std::end(kModels)) {
    std::string known;
    for (const Model& model : kModels) known += fmt::format(" {}", model.name);
    WHERRY_CHECK_ARGUMENT(false, Stage::route, "no model '{}'; known:{}", name, known);
  }
  return *found;
}

RouterConfig router_config(const Model& model, bool hash_layer) {
  WHERRY_CHECK_ARGUMENT(!hash_layer || model.hash_layers > 0, Stage::route,
                        "{} has no layers that are routed by a hash", model.name);
  return {.experts = model.experts,
          .topk = model.topk,
          .score = model.score,
          .selection = hash_layer ? Selection::hash : Selection::topk,
          .groups = model.groups,
          .groups_kept = model.groups_kept,
          .bias = model.bias && !hash_layer,
          .normalize = model.normalize,
          .scale = model.scale,
          .weight_on_input = model.weight_on_input};
}

}  // namespace wherry
