// What `wherry layer` is asked to do, and what came of it. A job is settled before ranks start; the
// outcome is plain data, so that rank 0 can leave it in memory that it shares with the launcher.
#pragma once

#include <cstdint>
#include <string>

#include "launch.hpp"
#include "options.hpp"
#include "stats.hpp"
#include "wherry/exchange.hpp"
#include "wherry/group.hpp"

namespace wherry::cli {

inline constexpr int kMostExperts = 1 << 16;
inline constexpr int kMostRanks = 1024;

struct LayerJob {
  LaunchOptions launch;
  RoutingOptions routing;
  Model model;  // with what the flags changed; its expert_hidden is that of the run
  std::string expert_hidden_sentence;  // how expert_hidden was chosen; empty: by the user
  std::int64_t tokens = 0;             // a rank
  int replicas = 0;                    // slots beyond one an expert
  int steps = 0;
  ExchangeConfig config;

  // Sets of ranks that hold the same tokens.
  [[nodiscard]] int sets() const noexcept { return launch.ranks / config.replicated; }
  [[nodiscard]] std::int64_t global_tokens() const noexcept { return tokens * sets(); }
};

// Counts are of the last step, summed over ranks; times are microseconds of the slowest rank.
struct LayerOutcome {
  Percentiles plan, dispatch, experts, combine;
  std::int64_t rows_received = 0;  // by the experts
  std::int64_t dispatch_rows = 0, dispatch_bytes = 0;
  std::int64_t combine_rows = 0, combine_bytes = 0;
  std::int64_t link_bytes = 0;  // of dispatch and combine, those between different ranks
  bool counts_traffic = true;   // whether the five above are known: on a GPU they are not
  std::uint64_t weight_bytes = 0, window_bytes = 0;

  std::int64_t verified_tokens = 0;
  double max_error = 0.0, tolerance = 0.0;
  bool verified = false;
  std::int64_t worst_token = -1, worst_column = -1;  // worst_token counts over all sets

  // Tokens of each expert, all timed steps together, and rows of each rank in them; the largest rank
  // over the mean as it was before the replicas were placed by load, and as it is.
  std::int64_t loads[kMostExperts] = {};
  std::int64_t rank_rows[kMostRanks] = {};
  double imbalance_before = 1.0, imbalance = 1.0;

  char kernels[32] = {}, fabric[32] = {}, experts_by[32] = {};
};

// What one rank does; collective. Rank 0 writes `outcome` before it returns.
void run_layer_rank(const Group& group, const LayerJob& job, LayerOutcome& outcome);

// The outcome for programs, on one line, and for people.
void print_layer_json(const LayerJob& job, const LayerOutcome& outcome);
void print_layer_text(const LayerJob& job, const LayerOutcome& outcome);

}  // namespace wherry::cli
