// The public face of GatedMlp: what is checked before the experts of a device see it.
#include <algorithm>
#include <utility>
#include <vector>

#include "experts/mlp.hpp"
#include "support/build_info.hpp"
#include "support/check.hpp"

namespace wherry {
namespace {

constexpr auto kOnCpu = std::to_array<std::string_view>({"onednn", "plain"});
constexpr auto kOnCuda = std::to_array<std::string_view>({"cublas"});

void check_config(const ExpertsConfig& config, std::span<const std::string_view> implementations) {
  WHERRY_CHECK_ARGUMENT(config.hidden >= 1, Stage::experts, "hidden is {}; it must be at least 1",
                        config.hidden);
  WHERRY_CHECK_ARGUMENT(config.expert_hidden >= 1, Stage::experts,
                        "expert_hidden is {}; it must be at least 1", config.expert_hidden);
  WHERRY_CHECK_ARGUMENT(config.num_threads >= 1, Stage::experts,
                        "num_threads is {}; it must be at least 1", config.num_threads);
  const std::string& implementation = config.implementation;
  WHERRY_CHECK_ARGUMENT(
      implementation.empty() ||
          std::ranges::find(implementations, implementation) != implementations.end(),
      Stage::experts, "no implementation '{}'; there {} {}", implementation,
      implementations.size() == 1 ? "is" : "are", fmt::join(implementations, " and "));
  WHERRY_CHECK(config.dtype == DType::bf16 || config.dtype == DType::f32, ErrorCode::unsupported,
               (Error::Where{Stage::experts, -1, -1}), "experts compute in bf16 or f32, not in {}",
               name(config.dtype));
}

void check_rows(const ExpertsConfig& config, ConstTensorView view, const char* what) {
  WHERRY_CHECK_ARGUMENT(view.dtype == config.dtype && view.cols == config.hidden, Stage::experts,
                        "{} is [{}, {}] {}; these experts take [n, {}] {}", what, view.rows,
                        view.cols, name(view.dtype), config.hidden, name(config.dtype));
  WHERRY_CHECK_ARGUMENT(view.data != nullptr || view.rows == 0, Stage::experts,
                        "{} has {} rows and no data", what, view.rows);
}

// Segments of slots: each within [0, rows).
void check_segments(std::int64_t num_slots, std::span<const std::int64_t> begin,
                    std::span<const std::int64_t> counts, std::int64_t rows) {
  const auto slots = static_cast<std::size_t>(num_slots);
  WHERRY_CHECK_ARGUMENT(counts.size() == slots && begin.size() >= slots, Stage::experts,
                        "{} slot_counts and {} slot_begin; there are {} slots", counts.size(),
                        begin.size(), num_slots);
  for (std::size_t slot = 0; slot < slots; ++slot) {
    const bool inside = counts[slot] == 0 || (begin[slot] >= 0 && counts[slot] > 0 &&
                                              begin[slot] <= rows - counts[slot]);
    WHERRY_CHECK_ARGUMENT(inside, Stage::experts,
                          "slot {} has {} rows from row {} on, but there are {} rows", slot,
                          counts[slot], begin[slot], rows);
  }
}

void check_gathered(const ExpertsConfig& config, std::int64_t num_slots, const Received& received,
                    TensorView out, bool on_host) {
  const std::int64_t rows = received.rows.rows;
  check_rows(config, received.rows, "received.rows");
  check_rows(config, out, "out");
  WHERRY_CHECK_ARGUMENT(out.rows >= rows, Stage::experts, "out has {} rows for {} received",
                        out.rows, rows);
  // On a device its lists cannot be looked through.
  if (!on_host) {
    const bool told = !received.slot_begin.empty();
    check_segments(num_slots, received.slot_begin, received.slot_counts,
                   told ? received.slot_begin.back() : 0);
    return;
  }
  const auto positions = static_cast<std::int64_t>(received.gather.size());
  check_segments(num_slots, received.slot_begin, received.slot_counts, positions);
  const auto choices = static_cast<std::int64_t>(received.choices.size());
  WHERRY_CHECK_ARGUMENT(rows == 0 ? choices == 0 : choices % rows == 0, Stage::experts,
                        "{} choices for {} received rows", choices, rows);
  for (std::size_t slot = 0; slot < received.slot_counts.size(); ++slot) {
    const std::int64_t first = received.slot_begin[slot];
    for (std::int64_t at = first; at < first + received.slot_counts[slot]; ++at) {
      const std::int32_t row = received.gather[static_cast<std::size_t>(at)];
      WHERRY_CHECK_ARGUMENT(row >= 0 && row < rows, Stage::experts,
                            "position {} of slot {} gathers row {} of {}", at, slot, row, rows);
    }
  }
  for (const Received::TokenChoice& choice : received.choices) {
    WHERRY_CHECK_ARGUMENT(
        choice.local_slot < 0 || (choice.position >= 0 && choice.position < positions),
        Stage::experts, "a choice of slot {} is at position {} of {}", choice.local_slot,
        choice.position, positions);
  }
}

}  // namespace

std::string_view name(Matrix matrix) noexcept {
  switch (matrix) {
    case Matrix::gate: return "gate";
    case Matrix::up: return "up";
    case Matrix::down: return "down";
  }
  return "?";
}

#if !WHERRY_HAS_GPU_EXPERTS
std::unique_ptr<Mlp> experts::make_cuda_mlp(Device /*device*/, const ExpertsConfig& /*config*/,
                                            std::span<const int> /*experts*/,
                                            const WeightSource& /*fill*/) {
  throw Error(ErrorCode::unsupported, {Stage::experts, -1, -1},
              fmt::format("this build has no experts on GPUs: {}",
                          build_info::reason_of("WHERRY_GPU_EXPERTS")));
}
#endif

GatedMlp::GatedMlp(const ExpertsConfig& config, std::span<const int> experts,
                   const WeightSource& fill)
    : GatedMlp(Device::cpu(), config, experts, fill) {}
GatedMlp::GatedMlp(Device device, const ExpertsConfig& config, std::span<const int> experts,
                   const WeightSource& fill) {
  if (device.kind == Device::Kind::cpu) {
    check_config(config, kOnCpu);
    mlp_ = experts::make_cpu_mlp(config, experts, fill);
  } else {
    check_config(config, kOnCuda);
    mlp_ = experts::make_cuda_mlp(device, config, experts, fill);
  }
}
GatedMlp::GatedMlp(GatedMlp&&) noexcept = default;
GatedMlp& GatedMlp::operator=(GatedMlp&&) noexcept = default;
GatedMlp::~GatedMlp() = default;

const ExpertsConfig& GatedMlp::config() const noexcept { return mlp_->config; }
Device GatedMlp::device() const noexcept { return mlp_->device(); }
void GatedMlp::set_stream(void* stream) { mlp_->set_stream(stream); }
std::int64_t GatedMlp::num_slots() const noexcept { return mlp_->num_slots; }
std::uint64_t GatedMlp::weight_bytes() const noexcept { return mlp_->weight_bytes(); }
const GatedMlp::Implementation& GatedMlp::implementation() const noexcept {
  return mlp_->implementation;
}

void GatedMlp::forward(ConstTensorView rows, std::span<const std::int64_t> slot_begin,
                       std::span<const std::int64_t> slot_counts, TensorView out) {
  check_rows(config(), rows, "rows");
  check_rows(config(), out, "out");
  check_segments(num_slots(), slot_begin, slot_counts, std::min(rows.rows, out.rows));
  mlp_->forward(rows, slot_begin, slot_counts, out);
}

void GatedMlp::forward_slots(ConstTensorView rows, std::span<const std::int64_t> slot_counts,
                             TensorView out) {
  check_rows(config(), rows, "rows");
  check_rows(config(), out, "out");
  const std::int64_t slots = std::max<std::int64_t>(num_slots(), 1);
  const std::int64_t rows_per_slot = rows.rows / slots;
  WHERRY_CHECK_ARGUMENT(rows.rows % slots == 0 && out.rows == rows.rows, Stage::experts,
                        "{} rows and {} of out; both must be the same multiple of {} slots",
                        rows.rows, out.rows, num_slots());
  // In a captured graph the host knows no counts.
  if (slot_counts.empty() && device().kind == Device::Kind::cuda) {
    return mlp_->forward_all_slots(rows, rows_per_slot, out);
  }
  for (std::size_t slot = 0; slot < slot_counts.size(); ++slot) {
    WHERRY_CHECK_ARGUMENT(slot_counts[slot] <= rows_per_slot, Stage::experts,
                          "slot {} has {} rows; it holds {}", slot, slot_counts[slot],
                          rows_per_slot);
  }
  const std::vector<std::int64_t> begin = mlp_->begin_of_slots(rows_per_slot);
  check_segments(num_slots(), begin, slot_counts, rows.rows);
  mlp_->forward(rows, begin, slot_counts, out);
}

void GatedMlp::forward_gathered(const Received& received, TensorView out) {
  const bool on_host = device().kind == Device::Kind::cpu;
  check_gathered(config(), num_slots(), received, out, on_host);
  mlp_->forward_gathered(received, out);
}

}  // namespace wherry
