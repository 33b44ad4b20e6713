// A legal configuration drawn from everything an exchange can be, with a routing and a sequence of
// steps; the same seed makes the same case. Every output is held against its definition.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "support/expected.hpp"

namespace wherry::test {

struct RandomCase {
  std::uint64_t seed = 0;
  int ranks = 1;
  bool processes = false;    // else threads
  bool delays = false;       // signals are late at random
  bool wide_ids = false;     // int64
  bool own_memory = false;   // results in the caller's memory, not in combine_input()
  bool copied_rows = false;  // received rows in the caller's memory
  bool scalars = false;
  bool addend = false;
  ExchangeConfig config;
  Batch batch;  // one part for each set of ranks that hold the same tokens; ids are logical experts

  // What every rank does, step by step; all ranks alike.
  enum class Use : std::uint8_t { paired, released, abandoned, overlapping };
  struct Step {
    Use use = Use::paired;
    bool replan = true;  // else the plan of the step before
    int shift = 0;       // added to every id
  };
  std::vector<Step> steps;

  [[nodiscard]] std::string text() const;  // everything that was drawn
};

// Draws ranks 1-16, hidden 1-16384, topk 1-32 and experts 1-1025, so many tokens that a case takes
// some milliseconds.
[[nodiscard]] RandomCase random_case(std::uint64_t seed);

// Runs the case on its ranks; throws, naming rank and token, where an output is wrong.
void run_case(const RandomCase& random_case);

}  // namespace wherry::test
