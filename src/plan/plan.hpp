// Stage 2 as two pure functions around the exchange of counts: count_routing() says how many rows
// this rank has for every slot and rank; assign_rows() turns everyone's counts into places.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "exchange/config.hpp"
#include "kernels/layout.hpp"
#include "wherry/error.hpp"
#include "wherry/exchange.hpp"

namespace wherry {

// Why a rank could not plan; travels in CountHeader::status, so that every rank gives up together.
enum class PlanFault : std::int32_t {
  none,
  bad_id,           // token, choice, id
  too_many_tokens,  // tokens
  bad_topk,         // choice holds the topk seen
  no_ids,           // tokens > 0 but ids is null
  negative_tokens,  // tokens
  empty_slot,       // token, choice, id
};

// Fills dest, slot, weight and repeat of `plan` and `entries` (rows per slot, then token rows per
// rank, of the tokens that this rank dispatches) from this rank's routing. Of a routing that cannot be
// planned it returns why.
[[nodiscard]] layout::CountHeader count_routing(const Routing& routing,
                                                const ExchangeConfig& config,
                                                const Placement& placement, int rank,
                                                PlanData& plan, std::span<std::int32_t> entries);

[[nodiscard]] ErrorCode code_of(PlanFault fault) noexcept;
// The sentence for a rank's fault.
[[nodiscard]] std::string describe_fault(const layout::CountHeader& header,
                                         const ExchangeConfig& config, const Placement& placement);

// Entries of one rank, as count_routing() made them.
using CountsOf = std::span<const std::int32_t>;

// Fills row, token_row and everything received of `plan` from the counts of all ranks, and adds what
// each expert gets to loads [experts]. Throws capacity (on every rank alike) if some rank would
// receive too much under Overflow::error.
void assign_rows(const std::vector<CountsOf>& counts, const ExchangeConfig& config,
                 const Placement& placement, const Capacity& capacity, int rank, PlanData& plan,
                 std::span<std::int64_t> loads);

}  // namespace wherry
