// Logits to scores, one token at a time, in fp64.
#pragma once

#include <cstdint>
#include <span>

#include "wherry/router.hpp"

namespace wherry {

// The largest logit of a token. Throws bad_argument naming the token (and the expert) for NaN,
// +inf, or no finite logit at all.
[[nodiscard]] float checked_max(std::int64_t token, std::span<const float> logits);

// e[i] = exp(logits[i] - max); returns their sum.
double exponentials(std::span<const float> logits, float max, std::span<double> e);

// The score of one logit, for scores that do not depend on the others: not softmax.
[[nodiscard]] double score_alone(Score score, double logit) noexcept;

// Scores of all experts; `max` is their checked_max().
void score_all(Score score, std::span<const float> logits, float max, std::span<double> scores);

}  // namespace wherry
