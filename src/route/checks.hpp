// Argument checks that the functions of stage 1 share.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "support/check.hpp"
#include "wherry/router.hpp"

namespace wherry {

// Divides rather than multiplies: rows may be any number a caller wrote.
inline void check_length(std::string_view what, std::size_t length, std::int64_t rows, int cols) {
  const auto have = static_cast<std::int64_t>(length);
  WHERRY_CHECK_ARGUMENT(have % cols == 0 && have / cols == rows, Stage::route,
                        "{} holds {} values; expected {} x {}", what, length, rows, cols);
}

inline void check_tokens(std::int64_t tokens) {
  WHERRY_CHECK_ARGUMENT(tokens >= 0, Stage::route, "tokens is {}; allowed: 0 or more", tokens);
}

// ids [rows, cols] of choices; `what` a row is ("token"), `first` the number of the first one.
inline void check_ids(std::string_view what, std::int64_t first, std::span<const std::int32_t> ids,
                      int cols, int experts) {
  for (std::size_t i = 0; i < ids.size(); ++i) {
    WHERRY_CHECK(ids[i] >= -1 && ids[i] < experts, ErrorCode::bad_routing,
                 (Error::Where{Stage::route, -1, -1}),
                 "{} {}, choice {} names expert {}; allowed: -1 (none) to {}", what,
                 first + static_cast<std::int64_t>(i) / cols, static_cast<std::int64_t>(i) % cols,
                 ids[i], experts - 1);
  }
}

}  // namespace wherry
