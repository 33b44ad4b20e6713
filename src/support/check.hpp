// Argument checks that print the values they saw. Host code only (fmt).
#pragma once

#include <fmt/format.h>

#include "wherry/error.hpp"

// Throws Error{code, where, formatted message} unless cond holds. `where` is an Error::Where.
#define WHERRY_CHECK(cond, code, where, ...)                            \
  do {                                                                  \
    if (!(cond)) {                                                      \
      throw ::wherry::Error((code), (where), fmt::format(__VA_ARGS__)); \
    }                                                                   \
  } while (false)

// For arguments of functions that belong to no rank: bad_argument of `stage`.
#define WHERRY_CHECK_ARGUMENT(cond, stage, ...)                                                    \
  WHERRY_CHECK(cond, ::wherry::ErrorCode::bad_argument, (::wherry::Error::Where{(stage), -1, -1}), \
               __VA_ARGS__)
