#include <cmath>

#include "support/check.hpp"
#include "wherry/router.hpp"

namespace wherry {

std::string_view name(Score score) noexcept {
  switch (score) {
    case Score::softmax: return "softmax";
    case Score::sigmoid: return "sigmoid";
    case Score::sqrtsoftplus: return "sqrtsoftplus";
    case Score::topk_softmax: return "topk_softmax";
  }
  return "softmax";
}

std::string_view name(Selection selection) noexcept {
  switch (selection) {
    case Selection::topk: return "topk";
    case Selection::hash: return "hash";
    case Selection::given: return "given";
  }
  return "topk";
}

std::string_view name(CapacityFormula formula) noexcept {
  switch (formula) {
    case CapacityFormula::deepspeed: return "deepspeed";
    case CapacityFormula::megatron: return "megatron";
  }
  return "deepspeed";
}

std::string_view name(DropPolicy policy) noexcept {
  switch (policy) {
    case DropPolicy::probs: return "probs";
    case DropPolicy::position: return "position";
  }
  return "probs";
}

void RouterConfig::check() const {
  WHERRY_CHECK_ARGUMENT(experts >= 1, Stage::route, "experts is {}; allowed: 1 or more", experts);
  WHERRY_CHECK_ARGUMENT(topk >= 1, Stage::route, "topk is {}; allowed: 1 or more", topk);
  WHERRY_CHECK_ARGUMENT(groups >= 1 && groups <= experts, Stage::route,
                        "groups is {}; allowed: 1 to {} (experts), so that no group is empty",
                        groups, experts);
  WHERRY_CHECK_ARGUMENT(
      experts % groups == 0, Stage::route,
      "groups is {}; allowed: a divisor of {} (experts), for groups of equal size", groups,
      experts);
  WHERRY_CHECK_ARGUMENT(groups_kept >= 1 && groups_kept <= groups, Stage::route,
                        "groups_kept is {}; allowed: 1 to {} (groups)", groups_kept, groups);
  const int candidates = groups_kept * (experts / groups);
  WHERRY_CHECK_ARGUMENT(selection != Selection::topk || topk <= candidates, Stage::route,
                        "topk is {}; allowed: 1 to {} (groups_kept {} of {} experts each)", topk,
                        candidates, groups_kept, experts / groups);
  WHERRY_CHECK_ARGUMENT(!bias || selection == Selection::topk, Stage::route,
                        "bias is set with selection '{}'; allowed: only with 'topk'",
                        name(selection));
  WHERRY_CHECK_ARGUMENT(std::isfinite(scale), Stage::route, "scale is {}; allowed: finite values",
                        scale);
  WHERRY_CHECK_ARGUMENT(!weight_on_input || topk == 1, Stage::route,
                        "weight_on_input with topk {}; allowed: topk 1, for a row has one weight",
                        topk);
}

}  // namespace wherry
