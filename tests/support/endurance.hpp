// Long runs: ranks that fail and survivors that go on, over and over; a million decode steps. Each
// throws where something is wrong or has grown, and returns what it saw.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace wherry::test {

// Called now and then with the number of rounds or steps that are done.
using Tell = std::function<void(std::int64_t done)>;

// Rounds of four processes: one is killed at a random place of start-up or of a step, the others name
// it and run a layer through a new exchange. Nothing may be left here: no child, fd or memory.
std::string run_killed_rounds(std::int64_t rounds, std::uint64_t seed, const Tell& tell);

// Rounds in the same three processes: one is late at a random stage, the others name it, run a layer
// without it, and all three meet again. Nothing may grow in any of them.
std::string run_late_rounds(std::int64_t rounds, std::uint64_t seed, const Tell& tell);

// Steps of decode in two processes through one exchange, routings that change; every output is
// compared, and memory must stay flat.
std::string run_decode_steps(std::int64_t steps, const Tell& tell);

}  // namespace wherry::test
