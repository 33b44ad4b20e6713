// The floor under a step: the same processes and threads copy each planned row to its place
// (dispatch), then read each result row and write the tokens (combine), with plain copies and no
// signals, weights or records, and none of the conversions: rows are as large as they travel. In
// memory of its own, mapped as an exchange maps its windows.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "fabric/fabric.hpp"
#include "meeting.hpp"
#include "stream.hpp"
#include "support/team.hpp"
#include "wherry/exchange.hpp"
#include "workload.hpp"

namespace wherry::bench {

class Floor {
 public:
  // Collective.
  Floor(const Group& group, const ExchangeConfig& config, const PlanData& plan);

  // When this rank began and ended the two halves of one pass; collective (the ranks meet).
  struct Pass {
    std::int64_t dispatch_begin, dispatch_end, combine_begin, combine_end;
  };
  [[nodiscard]] Pass run(Meeting& meeting, Stores stores);

  // Read and written by this rank in one pass, payload only.
  [[nodiscard]] std::int64_t bytes() const noexcept;

 private:
  struct Place {
    std::int32_t peer;
    std::int64_t row;
  };
  void copy_rows(std::int64_t begin, std::int64_t end, Stores stores);
  void gather_rows(std::int64_t begin, std::int64_t end, Stores stores);
  [[nodiscard]] std::byte* row(const Place& place) const noexcept;

  std::int64_t sent_bytes_, home_bytes_;  // of one row on its way out and home; whole cache lines
  std::int64_t pitch_;                    // of the rows in the window
  Rows x_;
  std::vector<std::int64_t> place_begin_;  // [tokens + 1]
  std::vector<Place> places_;              // where the rows of each token go
  Rows out_;
  Rows hot_;  // one row that stays in the cache, for tokens of another size than what comes home
  std::unique_ptr<Fabric> fabric_;
  Team team_;
};

}  // namespace wherry::bench
