// What the CUDA kernels of every stage take, and how a launch is shaped. Compiled by host and
// device. All pointers are device memory unless said otherwise; nothing here owns memory.
//
// One launch serves several ranks of a process: blockIdx.y picks the rank's arguments in a
// RankTable, blockIdx.x is the block within the rank. As one process per rank the table has one
// entry. All blocks of all ranks must be resident together, since they wait for each other.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/layout.hpp"
#include "wherry/format.hpp"
#include "wherry/types.hpp"

namespace wherry::kernels::cuda {

inline constexpr int kMaxDepth = 16;  // as ExchangeConfig::depth
inline constexpr int kMaxRanksPerLaunch = 8;
inline constexpr int kMaxTopk = 32;  // a lane for each choice of a token

// Stages that count the arrival of a rank's blocks.
enum class Arrival : std::uint32_t {
  planned,
  dispatch_sent,
  dispatch_received,
  combine_sent,
  combine_received,
};
inline constexpr int kNumArrivals = 5;

// Memory of one rank that no peer touches. Starts as zeros and is never cleared: epochs only grow
// and are advanced by the kernels that use them, so a captured graph can be replayed.
struct RankState {
  std::uint32_t sent[layout::kNumChannels][kMaxDepth];      // epoch of the last signal sent
  std::uint32_t received[layout::kNumChannels][kMaxDepth];  // epoch of the last signals seen
  // Blocks of the running launch that are done, or (planned) have seen the state; each wraps to 0.
  std::uint32_t arrived[kNumArrivals];
  std::uint32_t taken[kNumArrivals];  // items of the running launch (items.cuh); 0 again behind it
  std::uint32_t plans;                // plans filled; plan p uses count generation p mod 2
  std::uint32_t shared_plans;         // those that several blocks have counted
};

// The same for every call of an exchange.
struct RankContext {
  layout::WindowLayout layout;
  std::byte* const* windows;  // [ranks], this process's address of each window
  std::byte* own;             // windows[rank], where no load is needed for it
  RankState* state;
  std::uint64_t* fault_record;  // pinned host memory: 0, or the first fault (layout::pack_fault)
  std::uint64_t deadline_ns;    // of every wait
  std::int32_t rank;
  std::int32_t ranks;
  std::int32_t topk;
};

// Entries of PlanArrays::totals.
enum PlanTotal : int {
  kRowsReceived,
  kTokenRowsReceived,
  kPlanStatus,  // 0, or the PlanStatus that every rank agrees on
  kNumPlanTotals,
};
// Poison values of a count message and of a plan, which then sends no rows. Below kPlanOverflow a
// PlanFault, what one rank has found in its own routing.
enum PlanStatus : std::int32_t {
  kPlanGood = 0,
  kPlanBadExpert = 1,  // PlanFault::bad_id
  kPlanOverflow = 100,
  kPlanOtherPlacement,
};
// What is wrong with a plan. The same on every rank but for `serial`.
struct PlanReport {
  std::int64_t id;      // bad expert: the id; other PlanFault: the number that is wrong
  std::int64_t rows;    // overflow: how many would arrive
  std::int32_t status;  // PlanStatus
  std::int32_t peer;    // whose routing or placement it is, or whose memory is too small
  std::int32_t token;   // bad expert
  std::int32_t choice;
  std::int32_t slot;  // overflow of one slot, else -1
  std::uint32_t
      serial;  // which plan of the exchange it was, from 1; 0: nothing is wrong. Written last.
};

// A plan in device memory; the arrays are those of PlanData.
struct PlanArrays {
  std::int32_t* dest;             // [tokens, topk]
  std::int32_t* slot;             // [tokens, topk]
  std::int32_t* row;              // [tokens, topk]
  std::int32_t* token_row;        // [tokens, topk]
  float* weight;                  // [tokens, topk]
  std::uint8_t* repeat;           // [tokens, topk]
  std::int32_t* slot_counts;      // [local slots]
  std::int32_t* slot_begin;       // [local slots + 1]
  std::int32_t* token_rows_from;  // [ranks]
  std::int32_t* token_rows_to;    // [ranks]
  std::int32_t* token_row_begin;  // [ranks] token_row of the first that this rank sends there
  std::int32_t* totals;           // [kNumPlanTotals]
  PlanReport* report;             // or null
  std::int32_t tokens;            // of this rank; fixed by the launch, not read from memory
};
// Experts to slots to ranks, as in Placement.
struct PlacementArrays {
  const std::int32_t* expert_begin;  // [experts + 1] into expert_slots
  const std::int32_t* expert_slots;  // slots grouped by expert
  const std::int32_t* slot_rank;     // [slots]
  const std::int32_t* slot_begin;    // [ranks + 1]
  std::int32_t experts;
  std::int32_t slots;
};

// Which received row a choice of a token lands in.
enum class Rows : std::uint32_t {
  per_rank,  // Layout::tokens: one row per (token, rank), at token_row
  per_slot,  // grouped and slots: one row per (token, slot), all written by the sender
  first_slot,  // the same over a link: the sender writes one row on each other rank, and the receiver fills
               // the token's other slots from it
};

struct CountArgs {
  RankContext context;
  PlanArrays plan;
  PlacementArrays placement;
  const void* ids;       // int32 or int64 [tokens, topk], logical experts or -1
  const float* weights;  // [tokens, topk], or null: all 1
  std::byte* workspace;  // count_workspace_bytes(), zeros before the first use and never cleared
  std::int64_t* loads;   // [slots] rows that arrived, added up; or null
  PlanReport* report;  // pinned host memory: the first bad plan that the host has not seen; or null
  std::int64_t wrong;  // what a wrong number in the call is, if `call_status` says so
  std::uint64_t placement_hash;  // of kPlacementBits
  std::int32_t call_status;      // a PlanFault that the host has found; then there are no tokens
  bool ids_are_int64;
  std::int32_t chunk_tokens;      // tokens a block counts
  std::int32_t workspace_blocks;  // blocks that the workspace was made for
  std::int32_t alignment;         // grouped: rows of each slot's segment are a multiple of this
  std::int32_t rows_per_slot;     // slots: rows of each slot; 0: grouped
  std::int32_t row_limit;         // grouped: most rows of a rank, padding not counted; 0: no limit
  bool drops;                     // what is more than that, or than rows_per_slot, finds no place
};
inline constexpr int kPlacementBits = 40;

// As Received::TokenChoice.
struct TokenChoice {
  std::int32_t local_slot;
  float weight;
  std::int32_t position;
};
// Rows::per_rank: where the lists of what has come go.
struct Lists {
  TokenChoice* choices;  // [token rows, topk], or null: none are wanted
  std::int32_t* gather;  // [grouped positions], the row of each
  std::int32_t local_slots;
};

// What dispatch_send sends, and how.
struct Outgoing {
  const std::byte* x;
  std::uint64_t x_pitch;
  const std::byte* x_scales;  // of rows that are converted already: the plane of [plan.tokens] rows
  std::uint64_t scale_pitch;  // quantised rows: from one row to the next in the plane of scales
  std::uint32_t generation;
  Rows rows;
  bool entries;     // write TokenEntry records
  bool unweighted;  // the experts multiply: in the records each row counts once, with weight 1
  bool converted;   // x has the format in which it travels (dispatch_send_converted.cu)
  bool receive;     // also do what dispatch_recv does but for padding: wait for all, fill, list
  bool overlaps;    // with the kernels before and after it: no other rank uses the GPU
  bool
      rows_stay;  // in the second-level cache, which has room for them (e4m3, and plan_dispatch's bulk copies)
};

struct DispatchSendArgs {
  RankContext context;
  PlanArrays plan;
  Outgoing send;
  Lists lists;  // receive: also make these
};

// Plan and dispatch in one launch, for few tokens.
struct PlanDispatchArgs {
  CountArgs count;
  Outgoing send;
  // With Outgoing::receive, and windows that take atomic additions: every block adds its part to the signals,
  // so none is looked for that comes last.
  bool adds_signals;
};

struct DispatchRecvArgs {
  RankContext context;
  PlanArrays plan;
  std::uint32_t generation;
  Rows rows;
  WireFormat format;          // of the rows, whose scales lie by it
  std::uint64_t scale_pitch;  // Rows::first_slot: of a row's scales, or 0
  Lists lists;  // grouped: zero the padding between the segments of local_slots, 0: nothing to do
};

// Where a token's terms lie and how they are summed.
enum class Sum : std::uint32_t {
  token_rows,  // Layout::tokens: results, one per (token, rank), plain sum, ranks ascending
  partials,  // by_rank over a link: as ranked, but what other ranks (converted: all) have of a token
             // was summed there and pushed into this rank's window
  ranked,    // by_rank within one memory: results, one per (token, k); the partials are summed
             // at home with the same bits, which moves 9 rows for a token where partials move 20
  choices,   // by_token: results, one per (token, k), fused multiply-add, k ascending
};

struct CombineSendArgs {
  RankContext context;
  PlanArrays plan;
  std::uint32_t generation;
  DType dtype;
  bool partials;  // by_rank, converted: first sum the results of each token row and push the sum
  bool overlaps;  // as CombineRecvArgs::overlaps
};

struct CombineRecvArgs {
  RankContext context;
  PlanArrays plan;
  std::byte* out;
  std::uint64_t out_pitch;
  std::uint32_t generation;
  DType dtype;
  Sum sum;
  bool send;                // also do what combine_send does
  bool receive;             // false: no more than that (combine_partials.cu)
  bool unweighted;          // the experts have multiplied: all weights are 1
  bool overlaps;            // with the kernels before and after it: no other rank uses the GPU
  const std::byte* addend;  // [tokens], of the rows' type: the last term of each sum; or null
  std::uint64_t addend_pitch;
};

// Rows of a plan's arrivals from one memory to another of the same rank: results into the window, or
// rows out of it.
struct CopyRowsArgs {
  PlanArrays plan;
  const std::byte* from;
  std::byte* to;
  std::uint64_t from_pitch;
  std::uint64_t to_pitch;
  std::uint64_t row_bytes;
  Rows rows;  // per_rank: all token rows, else the rows of each slot
  std::int32_t local_slots;
  bool padding;  // grouped: the rows between the segments too
};

// The same where rows have another format in the window than outside.
struct ConvertRowsArgs {
  PlanArrays plan;
  WireFormat format;
  const std::byte* from;
  std::byte* to;
  std::uint64_t from_pitch;
  std::uint64_t to_pitch;
  std::byte* scales;  // the plane in the window, laid out for scale_rows rows; or null
  std::int64_t scale_rows;
  Rows rows;
  std::int32_t local_slots;
  bool padding;
  bool back;  // from the format to format.dtype
};

// One fp32 a row, on its way out or home (scalars.cu).
struct ScalarsArgs {
  RankContext context;
  PlanArrays plan;
  const float* from;
  float* to;
  std::uint32_t generation;
  std::int32_t local_slots;
};

// What the host asks a rank's device to tell its peers.
struct TellArgs {
  RankContext context;
  layout::Fault fault;       // cause 0: none, but a signal instead
  layout::Channel channel;   // credit, or handover
  std::uint32_t generation;  // of the channel
  bool send;                 // tell the peers that this rank is done with it
  bool receive;              // wait until all have told
};

template <typename Args>
struct RankTable {
  Args rank[kMaxRanksPerLaunch];
};

}  // namespace wherry::kernels::cuda
