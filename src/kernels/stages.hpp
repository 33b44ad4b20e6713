// What each stage's kernel takes and which kernel sets there are. The first of the two seams: what
// is done to memory that can be addressed. Arguments are plain data, so that host and device
// kernels can take the same.
//
// A kernel works on the range [begin, end) it is given (tokens or token rows); ranges of one call
// are disjoint, so several threads may run the same stage at once. When a kernel returns, its
// writes are ordered before a following release store (streaming stores are fenced).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "kernels/layout.hpp"
#include "wherry/exchange.hpp"
#include "wherry/format.hpp"
#include "wherry/types.hpp"

namespace wherry::kernels {

// The send side of a plan, [tokens, topk] each; see PlanData.
struct PlanArrays {
  std::int64_t tokens = 0;
  int topk = 0;
  const std::int32_t* dest = nullptr;
  const std::int32_t* row = nullptr;
  const std::int32_t* token_row = nullptr;
  const float* weight = nullptr;
  const std::uint8_t* repeat = nullptr;
};

// Where memory is: all windows have the same layout.
struct Windows {
  layout::WindowLayout layout{};
  std::byte* const* base = nullptr;  // [ranks], this rank's address of each window
  int rank = 0;
  int ranks = 0;
  std::uint64_t generation = 0;
};

// What the configuration asks of the kernels.
struct Mode {
  Layout layout = Layout::grouped;
  Reduction reduction = Reduction::by_token;
  Weights weights = Weights::multiply;
  SumAt sum_at = SumAt::home;
  DType dtype = DType::bf16;
  std::int64_t hidden = 0;
  WireFormat dispatch_wire{};  // how rows travel to the experts
  WireFormat combine_wire{};   // how results (or partials) travel home

  // Rows are converted on the way out, results on the way home.
  [[nodiscard]] bool converts_rows() const noexcept { return !dispatch_wire.keeps_dtype(); }
  [[nodiscard]] bool converts_home() const noexcept { return !combine_wire.keeps_dtype(); }
  // Results lie in the window as the experts made them: home reads them so, or the partials that
  // are converted instead.
  [[nodiscard]] bool keeps_results() const noexcept { return !converts_home() || sums_partials(); }
  // Between sums, before they are rounded, and what travels home.
  [[nodiscard]] WireFormat sum_format() const noexcept {
    WireFormat format = combine_wire;
    format.dtype = dtype == DType::f64 ? DType::f64 : DType::f32;
    return format;
  }

  // One payload row per (token, rank) instead of per (token, slot).
  [[nodiscard]] constexpr bool sends_token_rows() const noexcept {
    return layout == Layout::tokens;
  }
  // The expert's rank sums what it has of a token before it goes home.
  [[nodiscard]] constexpr bool sums_partials() const noexcept {
    return reduction == Reduction::by_rank && layout != Layout::tokens && sum_at == SumAt::expert;
  }
  // TokenEntry records travel with the rows: the receiver must know which rows make a token.
  [[nodiscard]] constexpr bool sends_entries() const noexcept {
    return layout == Layout::tokens || sums_partials();
  }
  // Home gets one row per (token, rank), summed already.
  [[nodiscard]] constexpr bool pulls_partials() const noexcept {
    return layout == Layout::tokens || sums_partials();
  }
};

// dispatch_send, over tokens: x row t to its places in the peers' windows, converted to the wire
// format unless x is in it already.
struct DispatchSend {
  Windows windows;
  PlanArrays plan;
  Mode mode;
  const std::byte* x = nullptr;
  std::int64_t x_pitch = 0;
  bool converted = false;               // x is in the wire format
  const std::byte* x_scales = nullptr;  // then: the plane of its scales, of plan.tokens rows
  const float* row_scalars = nullptr;   // [tokens, topk] or null
  bool streaming = false;               // the rows are more than caches hold: write around them
};

// dispatch_recv, over local slots: zero the alignment padding between segments (grouped), or list
// the rows that each grouped position gathers (tokens).
struct DispatchRecv {
  Windows windows;
  Mode mode;
  std::span<const std::int64_t> slot_counts;
  std::span<const std::int64_t> slot_begin;
  std::int64_t token_rows = 0;
  int topk = 0;
  Received::TokenChoice* choices = nullptr;  // [token_rows, topk], tokens only
  std::int32_t* gather = nullptr;            // [slot_begin.back()], tokens only
};

// combine_send, over token rows: sum the results of each token row into its partial (by_rank).
struct CombineSend {
  Windows windows;
  Mode mode;
  int topk = 0;
  bool streaming = false;
};

// combine_recv, over tokens: pull the results home and sum them into out.
struct CombineRecv {
  Windows windows;
  PlanArrays plan;
  Mode mode;
  std::byte* out = nullptr;
  std::int64_t out_pitch = 0;
  const std::byte* addend = nullptr;  // or null
  std::int64_t addend_pitch = 0;
  float* scalars_out = nullptr;  // [tokens, topk] or null
  bool streaming = false;
};

// Payload rows a kernel has really moved: counted where they move, so that tests can hold them
// against the plan.
struct Moved {
  std::int64_t rows = 0;       // all
  std::int64_t link_rows = 0;  // those that went to or came from another rank
};

struct KernelSet {
  std::string_view name;
  Moved (*dispatch_send)(const DispatchSend&, std::int64_t begin, std::int64_t end);
  void (*dispatch_recv)(const DispatchRecv&);
  void (*combine_send)(const CombineSend&, std::int64_t begin, std::int64_t end);
  Moved (*combine_recv)(const CombineRecv&, std::int64_t begin, std::int64_t end);
  // One row to a wire format and back, as wherry/format.hpp defines them.
  void (*quantize_row)(const WireFormat&, const std::byte* x, std::byte* payload,
                       std::byte* scales);
  void (*dequantize_row)(const WireFormat&, const std::byte* payload, const std::byte* scales,
                         std::byte* x);
};

// All sets this machine can run, the best first; `reference` is always the last.
[[nodiscard]] std::span<const KernelSet> available();
// By name; empty: the environment variable WHERRY_KERNELS, if it does not name one of kOnCuda, else the best.
// Throws unsupported, listing the names that exist.
[[nodiscard]] const KernelSet& find(std::string_view name);

// What an exchange on a GPU may be asked for.
inline constexpr std::string_view kOnCuda[] = {"cuda", "cuda_link", "cuda_copy"};
[[nodiscard]] bool is_on_cuda(std::string_view name);
// WHERRY_KERNELS, if it names none of available(); whether it names one of kOnCuda is for the caller to check.
[[nodiscard]] std::string_view from_environment_on_cuda();

inline constexpr int kMaxTopk = 64;

}  // namespace wherry::kernels
