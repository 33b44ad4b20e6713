// How wide the experts of the command line are when nobody says: as wide as memory allows.
#pragma once

#include <cstdint>
#include <string>

#include "route/models.hpp"
#include "wherry/types.hpp"

namespace wherry {

// Bytes this process may still allocate without swapping: MemAvailable, or less under a cgroup.
[[nodiscard]] std::uint64_t available_memory();

// Bytes of the weights of `experts` gated MLPs.
[[nodiscard]] std::uint64_t expert_weight_bytes(std::int64_t experts, std::int64_t hidden,
                                                std::int64_t expert_hidden, DType dtype) noexcept;

struct ExpertHidden {
  std::int64_t value = 0;
  std::string sentence;  // what was chosen and why, to print
};
// The largest power of two, at most model.expert_hidden, with which the weights of all
// model.experts take at most min(4 GB, half of `available` bytes). Throws out_of_memory, with a
// sentence that says what fits, if even 1 does not.
[[nodiscard]] ExpertHidden default_expert_hidden(const Model& model, DType dtype,
                                                 std::uint64_t available);

}  // namespace wherry
