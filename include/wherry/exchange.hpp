// Stages 3 and 5, dispatch and combine: rows to the ranks that hold their experts, results home.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "wherry/error.hpp"
#include "wherry/format.hpp"
#include "wherry/group.hpp"
#include "wherry/placement.hpp"
#include "wherry/plan.hpp"
#include "wherry/types.hpp"

namespace wherry {

// How received rows lie in memory.
enum class Layout : std::uint8_t {
  grouped,  // one row per (token, slot), contiguous by slot, segments padded to `alignment`
  tokens,   // one row per (token, rank), with an index for GEMMs that gather
  slots,    // [slots_local, rows_per_slot] at fixed addresses, plus counts
};
// What goes home and in which order it is summed; see docs/numerics.md.
enum class Reduction : std::uint8_t {
  by_token,  // every (token, k) row; summed at home in k order
  by_rank,   // one row per (token, rank), summed there in k order; at home ranks ascending
};
enum class Overflow : std::uint8_t {
  error,  // ErrorCode::capacity on every rank before a row leaves
  drop,   // rows past the end are not sent, count as weight 0 at home and are reported per slot
};
enum class Weights : std::uint8_t {
  multiply,  // combine multiplies by the routing weights
  caller,    // the experts have multiplied already: w = 1 everywhere
};

// by_rank over grouped and slots: who sums what one rank has of a token. The bits are the same.
enum class SumAt : std::uint8_t {
  home,  // home reads every row and rounds each rank's share itself: fewest bytes in shared memory
  expert,  // the expert's rank writes one row per (token, rank): fewest bytes over a link
};

// What the ids of a Routing number.
enum class ExpertIds : std::uint8_t {
  logical,   // experts; the exchange chooses among their replicas
  physical,  // slots of the placement; the caller has chosen
};

// Token-replicated groups: whom combine gives the sums of a token to.
enum class CombineTo : std::uint8_t {
  all,    // every rank that holds the token; each reads all of its results
  share,  // only the rank that dispatched it
};

[[nodiscard]] std::string_view name(Layout layout) noexcept;
[[nodiscard]] std::string_view name(Reduction reduction) noexcept;
[[nodiscard]] std::string_view name(Overflow overflow) noexcept;
[[nodiscard]] std::string_view name(Weights weights) noexcept;
[[nodiscard]] std::string_view name(SumAt sum_at) noexcept;
[[nodiscard]] std::string_view name(ExpertIds expert_ids) noexcept;
[[nodiscard]] std::string_view name(CombineTo combine_to) noexcept;

// Must be equal on every rank; the constructor of Exchange compares. Use designated initialisers.
struct ExchangeConfig {
  int experts = 0;              // logical experts of the layer, >= 1
  int topk = 0;                 // choices a token, >= 1
  std::int64_t hidden = 0;      // elements a row, >= 1 (bytes for DType::raw)
  std::int64_t max_tokens = 0;  // most tokens any rank brings to one plan, >= 1
  DType dtype = DType::bf16;    // of x, y and out
  Layout layout = Layout::grouped;
  std::optional<Reduction> reduction =
      std::nullopt;  // default: by_rank for grouped and tokens, by_token for slots
  Weights weights = Weights::multiply;
  // by_rank only; default: home, or expert where combine_wire converts (sums must not be converted
  // twice, so home is refused there), and between GPUs
  std::optional<SumAt> sum_at = std::nullopt;
  // How rows travel. With a wire that converts, dispatch_send quantises each token once and rows
  // arrive in that format with their scales apart; results (by_token, tokens) or the sums of each
  // rank (by_rank) go home in combine_wire and are summed in fp32 (f64 rows: in fp64).
  Wire dispatch_wire = Wire::same;
  Wire combine_wire = Wire::same;
  ScaleLayout scale_layout = ScaleLayout::row_major;  // of the received rows' scales
  std::optional<Placement> placement =
      std::nullopt;  // default: Placement::contiguous(experts, ranks)
  ExpertIds expert_ids = ExpertIds::logical;
  // Token-replicated groups (attention under tensor parallelism): the ranks [i * replicated,
  // (i + 1) * replicated) hold the same tokens and give plan() the same routing. The j-th of them
  // dispatches only its share, tokens [T * j / replicated, T * (j + 1) / replicated). Divides the ranks.
  int replicated = 1;
  CombineTo combine_to = CombineTo::all;
  std::int64_t receive_rows =
      0;  // grouped, tokens: most rows a rank accepts; 0: as many as can come
  std::int64_t rows_per_slot = 0;  // slots: rows each slot accepts; 0: as many as can come
  Overflow overflow = Overflow::error;
  int alignment = 1;  // grouped: each slot's segment is a multiple of this many rows
  int depth = 1;      // dispatches that may be in flight at once, 1..16
  Seconds deadline = kDefaultDeadline;  // of every wait
  int num_threads = 1;                  // threads this rank copies and sums with
  int num_sms =
      0;  // CUDA: blocks of a launch, one a multiprocessor; 0: 16, or what its ranks share
  bool populate = true;  // touch window pages at construction, not in the first steps
  // Kernel set by name; empty: WHERRY_KERNELS if it names one of the exchange's device, else the best. On CUDA:
  // cuda; cuda_link, the same as it is launched where ranks are on several GPUs; cuda_copy, without bulk copies.
  std::string kernels = {};

  [[nodiscard]] Reduction effective_reduction() const noexcept;
  [[nodiscard]] SumAt effective_sum_at() const noexcept;
  // Bytes of the window every rank registers, exactly; ranks on several GPUs, or with kernels = cuda_link: with
  // sum_at set, since its default is another there. Throws bad_argument as the constructor does.
  [[nodiscard]] std::uint64_t window_bytes(int ranks) const;
  // (field, value) of everything that must agree, for comparison and for people.
  [[nodiscard]] std::vector<std::pair<std::string, std::string>> describe(int ranks) const;
};

// Rows that have arrived. Views into the window: valid until the generation is used again, which
// is `depth` dispatches later, or until Exchange::release(). Host memory.
struct Received {
  // grouped: [slot_begin.back(), hidden]; tokens: [token rows, hidden];
  // slots: [slots_local * rows_per_slot, hidden]. Padding rows between segments are zero; in
  // `slots`, rows beyond a slot's count are unspecified. Of the exchange's dtype, or of what
  // dispatch_wire carries: another dtype, or, quantised, DType::raw with wire.payload_bytes columns.
  TensorView rows;
  WireFormat wire;               // of `rows`; see dequantize()
  const void* scales = nullptr;  // their plane in wire.scale_layout, laid out for scale_rows rows;
  std::int64_t scale_rows = 0;   // null where the wire has none
  std::span<const std::int64_t> slot_counts;  // rows of each local slot, without padding
  std::span<const std::int64_t>
      slot_begin;                      // first (grouped) row of each local slot, [slots_local + 1]
  std::span<const float> row_scalars;  // one a row if the senders gave them, else empty

  // tokens only. One TokenChoice per (row, k), in k order: the local slot it was sent to (-1: this
  // choice is elsewhere), its weight, and its position if the rows were grouped (which is where a
  // gathered GEMM leaves its result); and for each grouped position the row to gather.
  struct TokenChoice {
    std::int32_t local_slot;
    float weight;
    std::int32_t position;
  };
  std::span<const TokenChoice> choices;  // [token rows, topk]
  std::span<const std::int32_t> gather;  // [slot_begin.back()], row of each grouped position

  std::uint64_t step = 0;  // which dispatch this is, counted from 1

  // On CUDA the host does not know how many rows come: `rows` is all the room there is for them (its
  // first slot_begin[slots_local] or token rows are filled), the spans above are empty, and the counts
  // are here, in the device's memory, at addresses that stay as long as the plan (choices, gather: as
  // the exchange). Plan::to_host() brings them to the host.
  struct OnDevice {
    const std::int32_t* slot_counts = nullptr;  // [slots_local]
    const std::int32_t* slot_begin = nullptr;   // [slots_local + 1]
    const std::int32_t* num_rows = nullptr;     // [2]: grouped rows without padding; token rows
    int topk = 0;                               // of choices
    const TokenChoice* choices = nullptr;       // tokens: [token rows, topk]
    const std::int32_t* gather = nullptr;       // tokens: [slot_begin[slots_local]]
    // [slot_begin[slots_local]] one a row, if the senders gave them: the host does not know that.
    const float* row_scalars = nullptr;
  };
  OnDevice device;
};

struct DispatchOptions {
  // Memory for the received rows, if they shall not stay in the window: at least as many rows as the
  // plan receives (grouped and slots: with padding), filled by finish(), then viewed by Received. Of
  // the exchange's dtype: rows that travelled in another format are converted back.
  TensorView out = {};
  // x is in dispatch_wire already: of the dtype and shape that Received::rows would have, with its
  // scales, as quantize() leaves them, in a plane of plan.tokens() rows in config.scale_layout.
  const void* x_scales = nullptr;
  // One fp32 per (token, k), [tokens, topk], that travels with the row (a weight, a gradient). All
  // ranks that have tokens give them, or none does; on CUDA nobody notices if they do not, and what
  // arrives is unspecified.
  const float* row_scalars = nullptr;
};
struct CombineOptions {
  // One fp32 per received row to send home, and where they go, [plan.home_tokens(), topk].
  const float* row_scalars = nullptr;
  float* scalars_out = nullptr;
  // Added to the sum before it is rounded, [plan.home_tokens(), hidden] of the exchange's dtype, e.g. a shared
  // expert's output or a residual. It is the last term: out = round(sum + addend).
  ConstTensorView addend = {};
};

// Traffic of this rank since construction, in rows and bytes of payload. `link` counts what went
// to or came from another rank; the rest stayed at home.
struct Traffic {
  std::int64_t dispatch_rows = 0, dispatch_bytes = 0, dispatch_link_bytes = 0;
  std::int64_t combine_rows = 0, combine_bytes = 0, combine_link_bytes = 0;
};

class DeviceExchange;

// A collective object: constructed, used and destroyed by every rank of the group, with the halves
// issued in the same order on all of them. One thread uses it at a time.
//
// After an error whose remedy is not "fix the call" the exchange stays failed: every later call
// throws the first cause again.
//
// On a GPU (Device::cuda) every call is ordered in a stream, the one of set_stream(): it returns when its
// kernels are launched, waits for nothing on the device, allocates nothing, and is legal while the stream
// is captured. A captured graph holds whole multiples of `depth` steps and is captured when each
// generation has been used once in the same way. All tensors, ids and weights are device memory. What
// plan() finds wrong in the data (also a routing of the wrong shape) makes that step carry no rows and
// is thrown, on all ranks, by Plan::to_host() and by the next check() after it has run. Ranks that are
// threads of one process on one GPU launch together, so each call returns when all of them have made
// it, and they use one stream.
class Exchange {
  struct State;

 public:
  // Collective, blocking. Compares the configurations of all ranks (config_mismatch names the field
  // and both values, on every rank) and maps the windows of all peers. Throws bad_argument,
  // config_mismatch, out_of_memory, timeout, peer_failed.
  Exchange(const Group& group, const ExchangeConfig& config);
  // The same on a device, which is of one kind on all ranks. On CUDA also throws unsupported (on every
  // rank) for what the GPU kernels cannot do yet (docs/usage.md lists it); the message says what. `window`:
  // memory of the GPU for this rank's window, which the exchange then does not take itself: window_bytes(),
  // or the number that the error names; from cudaMalloc, aligned to 256 bytes, zeroed here, kept by the
  // caller until the exchange is gone. All ranks give some, or none does.
  Exchange(const Group& group, Device device, const ExchangeConfig& config,
           std::span<std::byte> window = {});
  Exchange(Exchange&&) noexcept;
  Exchange& operator=(Exchange&&) noexcept;
  ~Exchange();

  [[nodiscard]] const ExchangeConfig& config() const noexcept;
  [[nodiscard]] const Placement& placement() const noexcept;
  [[nodiscard]] int rank() const noexcept;
  [[nodiscard]] int size() const noexcept;
  [[nodiscard]] std::string_view kernels() const noexcept;  // the set that runs
  [[nodiscard]] std::string_view fabric() const noexcept;   // how bytes reach the peers
  [[nodiscard]] std::uint64_t window_bytes() const noexcept;
  [[nodiscard]] Device device() const noexcept;

  // The cudaStream_t in which the following calls are ordered; null, as at first, is the default stream.
  // The caller orders one stream after the other when it changes. Local; no effect on the CPU.
  void set_stream(void* stream);

  // Local. Allocates everything that plan() will fill.
  [[nodiscard]] Plan make_plan() const;

  // Stage 2. Collective, blocking on the CPU: exchanges counts, then fills `plan`. A bad id or bad
  // shape on one rank is an error on all of them, and the exchange stays usable. Throws
  // bad_argument, bad_routing, capacity, config_mismatch (placements), timeout, peer_failed, fault.
  void plan(const Routing& routing, Plan& plan);

  // The first half of dispatch: writes the rows of x [plan.tokens(), hidden] to where they belong
  // (under `replicated` those of this rank's share) and returns without waiting for this step's peers. x must stay unchanged until finish().
  // finish() waits for the rows of all peers. Throws misuse if `depth` dispatches are in flight.
  class DispatchHandle {
   public:
    Received finish();

   private:
    friend class Exchange;
    State* state_ = nullptr;
    DeviceExchange* device_ = nullptr;
    std::uint64_t step_ = 0;
  };
  [[nodiscard]] DispatchHandle dispatch_begin(const Plan& plan, ConstTensorView x,
                                              const DispatchOptions& options = {});
  Received dispatch(const Plan& plan, ConstTensorView x, const DispatchOptions& options = {});

  // plan() and dispatch() in one call, which on CUDA is one launch where tokens are few (decode).
  Received plan_dispatch(const Routing& routing, Plan& plan, ConstTensorView x,
                         const DispatchOptions& options = {});

  // Where the experts may write the results of the oldest uncombined dispatch of `plan`, so that
  // combine need not copy them: one result row for each received row, in the same places. Throws
  // unsupported where combine_wire converts each result: there is no room for it as it is.
  [[nodiscard]] TensorView combine_input(const Plan& plan);

  // Stage 5. y holds one row for each received row of that dispatch (combine_input() or the
  // caller's memory); out [plan.home_tokens(), hidden] gets the sums, exactly 0 for a token without
  // expert. Pairs with the oldest uncombined dispatch of `plan`. combine_begin() returns without
  // waiting for this step's peers; y and out must stay until finish().
  class CombineHandle {
   public:
    void finish();

   private:
    friend class Exchange;
    State* state_ = nullptr;
    DeviceExchange* device_ = nullptr;
    std::uint64_t step_ = 0;
  };
  [[nodiscard]] CombineHandle combine_begin(const Plan& plan, ConstTensorView y, TensorView out,
                                            const CombineOptions& options = {});
  void combine(const Plan& plan, ConstTensorView y, TensorView out,
               const CombineOptions& options = {});

  // Frees the rows of a dispatch that no combine will follow. Without it they are freed on entering
  // the dispatch that needs their generation. Collective in order, does not wait.
  void release(const Received& received);

  // Throws the first cause if the exchange has failed, here or on a peer. Local. On CUDA it looks at what
  // the device has found by now and does not wait for it; a bad plan is thrown once.
  void check();

  // Rows that each logical expert got from all ranks, summed over all plans since construction or
  // reset_loads(), [experts]. The same on every rank, for it costs no communication (plan() sees
  // everyone's counts): so every rank can balance() by it alone and find the same placement. A
  // token that names an expert twice counts once, rows that were dropped count. Local. On CUDA of the
  // plans that have run by now; copies them to the host, so not while a stream is captured.
  [[nodiscard]] std::span<const std::int64_t> loads() const;
  void reset_loads();

  // From the next plan() on, experts live where `placement` says: the same experts and ranks, the
  // same slots on every rank, other experts in them. Results do not change (by_token: not a bit).
  // Local and at once, but every rank must switch between the same two plans; the next plan()
  // compares and throws config_mismatch on every rank where they differ. Dispatch refuses plans that
  // were filled before. Copying the weights is the caller's (moves() says which). Throws
  // bad_argument, and misuse while a half is in flight.
  // (On CUDA it waits for the stream.)
  void set_placement(const Placement& placement);
  // Not counted on CUDA.
  [[nodiscard]] Traffic traffic() const noexcept;

 private:
  friend std::vector<Exchange> make_sharing_exchanges(const Group& group, Device device,
                                                      std::span<const ExchangeConfig> configs,
                                                      std::span<std::byte> window);
  explicit Exchange(std::unique_ptr<State> state);
  explicit Exchange(std::unique_ptr<DeviceExchange> device);
  [[nodiscard]] DevicePlan& on_device(const Plan& plan, Stage stage) const;
  void fill_shape(const Routing& routing, Plan& plan) const;
  // One of the two: rows in the memory of the CPU, or of a device.
  std::unique_ptr<State> state_;
  std::unique_ptr<DeviceExchange> device_;
};

// Exchanges that share one window (prefill and decode, layers of different shapes): each has its own
// signals and counts, the rows of one lie where the rows of the others do, so the window is as large
// as the largest needs. They take turns: entering a dispatch waits until every rank is done with the
// one before, whose received rows and uncombined dispatches are then gone. Collective; throws as the
// constructor of Exchange does. On CUDA a captured graph begins with a handover, whoever had the window
// when it was captured, so graphs of the exchanges and calls may follow each other in any order (the
// same on all ranks, all in one stream or ordered by the caller).
[[nodiscard]] std::vector<Exchange> make_sharing_exchanges(const Group& group,
                                                           std::span<const ExchangeConfig> configs);
[[nodiscard]] std::vector<Exchange> make_sharing_exchanges(const Group& group, Device device,
                                                           std::span<const ExchangeConfig> configs,
                                                           std::span<std::byte> window = {});

}  // namespace wherry
