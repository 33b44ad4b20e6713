#include "experts/gated_mlp.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "experts/activation.hpp"
#include "kernels/numerics.hpp"
#include "support/build_info.hpp"
#include "support/check.hpp"

namespace wherry {
namespace {

using experts::kBlockRows;
using experts::kMaxPanelCols;
using experts::kPanelRows;
using experts::Pages;
using experts::PanelShape;

void store(float value, std::uint16_t* out) { *out = float_to_bf16(value); }
void store(float value, float* out) { *out = value; }

// fn(typed out) for bf16 and f32, the only dtypes here.
template <typename Fn>
void with_elements(DType dtype, std::byte* out, const Fn& fn) {
  if (dtype == DType::bf16) {
    fn(reinterpret_cast<std::uint16_t*>(out));
  } else {
    fn(reinterpret_cast<float*>(out));
  }
}

void check_config(const ExpertsConfig& config) {
  WHERRY_CHECK_ARGUMENT(config.hidden >= 1, Stage::experts, "hidden is {}; it must be at least 1",
                        config.hidden);
  WHERRY_CHECK_ARGUMENT(config.expert_hidden >= 1, Stage::experts,
                        "expert_hidden is {}; it must be at least 1", config.expert_hidden);
  WHERRY_CHECK_ARGUMENT(config.num_threads >= 1, Stage::experts,
                        "num_threads is {}; it must be at least 1", config.num_threads);
  const std::string& implementation = config.implementation;
  WHERRY_CHECK_ARGUMENT(
      implementation.empty() || implementation == "onednn" || implementation == "plain",
      Stage::experts, "no implementation '{}'; there are onednn and plain", implementation);
  WHERRY_CHECK(config.dtype == DType::bf16 || config.dtype == DType::f32, ErrorCode::unsupported,
               (Error::Where{Stage::experts, -1, -1}), "experts compute in bf16 or f32, not in {}",
               name(config.dtype));
}

}  // namespace

namespace experts {

#if !WHERRY_HAS_CPU_EXPERTS
std::unique_ptr<PanelMatmul> make_onednn_matmul(const PanelShape&, std::string& reason) {
  const auto* const option =
      std::ranges::find(build_info::kOptions, "WHERRY_CPU_EXPERTS", &build_info::Option::name);
  reason = fmt::format("this build has no oneDNN: {}",
                       option != build_info::kOptions.end() ? option->reason : "not asked for");
  return nullptr;
}
#endif

void PackedMatrix::pack(std::int64_t slot, const std::byte* weights) const {
  const std::int64_t row_bytes = shape.inner * dtype_bytes(shape.dtype);
  std::vector<std::byte> padded;
  for (std::int64_t at = 0; at < num_panels; ++at) {
    const std::byte* from = weights + at * shape.cols * row_bytes;
    if (cols_of(at) < shape.cols) {
      padded.assign(static_cast<std::size_t>(shape.cols * row_bytes), std::byte{0});
      std::memcpy(padded.data(), from, static_cast<std::size_t>(cols_of(at) * row_bytes));
      from = padded.data();
    }
    matmul->pack(from, const_cast<std::byte*>(panel(slot, at)));
  }
}

}  // namespace experts

GatedMlp::State::State(const ExpertsConfig& config_in, std::span<const int> experts_in,
                       const WeightSource& fill)
    : config((check_config(config_in), config_in)),
      num_slots(static_cast<std::int64_t>(experts_in.size())),
      team(config_in.num_threads) {
  choose_implementation();
  pack_experts(experts_in, fill);
  const auto elements = static_cast<std::size_t>(kBlockRows * dtype_bytes(config.dtype));
  staged = Pages(elements * static_cast<std::size_t>(config.hidden), "rows of the experts");
  activations = Pages(elements * static_cast<std::size_t>(config.expert_hidden),
                      "activations of the experts");
  gates = Pages(
      static_cast<std::size_t>(kBlockRows * gate.num_panels * gate.shape.cols) * sizeof(float),
      "activations of the experts");
}

void GatedMlp::State::choose_implementation() {
  const auto in = PanelShape::choose(config.hidden, config.expert_hidden, config.dtype);
  const auto out = PanelShape::choose(config.expert_hidden, config.hidden, config.dtype);
  implementation = {"plain", "asked for"};
  if (config.implementation != "plain") {
    if (config.dtype == DType::bf16) {
      inward = experts::make_onednn_matmul(in, implementation.reason);
      if (inward) outward = experts::make_onednn_matmul(out, implementation.reason);
    } else {
      implementation.reason = "oneDNN is used for bf16 only";
    }
    if (outward) implementation.name = "onednn";
    WHERRY_CHECK(outward || config.implementation.empty(), ErrorCode::unsupported,
                 (Error::Where{Stage::experts, -1, -1}), "the experts cannot run on oneDNN: {}",
                 implementation.reason);
  }
  if (!outward) {
    inward = experts::make_plain_matmul(in);
    outward = experts::make_plain_matmul(out);
  }
  gate = up = {in, inward.get(), config.expert_hidden,
               (config.expert_hidden + in.cols - 1) / in.cols, nullptr};
  down = {out, outward.get(), config.hidden, (config.hidden + out.cols - 1) / out.cols, nullptr};
}

void GatedMlp::State::pack_experts(std::span<const int> experts_in, const WeightSource& fill) {
  const std::array<experts::PackedMatrix*, 3> matrices = {&gate, &up, &down};
  std::size_t total = 0;
  for (const experts::PackedMatrix* matrix : matrices) {
    total +=
        static_cast<std::size_t>(num_slots * matrix->num_panels) * matrix->matmul->panel_bytes();
  }
  weights = Pages(total, "the weights of the experts");
  std::byte* next = weights.data();
  for (experts::PackedMatrix* matrix : matrices) {
    matrix->first_panel = next;
    next +=
        static_cast<std::size_t>(num_slots * matrix->num_panels) * matrix->matmul->panel_bytes();
  }
  if (num_slots == 0) return;
  // The three matrices of an expert are of one size: the buffer holds one at a time.
  const Pages plain(static_cast<std::size_t>(config.expert_hidden * row_bytes()),
                    "the weights of one expert");
  for (std::int64_t slot = 0; slot < num_slots; ++slot) {
    for (const Matrix which : {Matrix::gate, Matrix::up, Matrix::down}) {
      const experts::PackedMatrix& matrix = *matrices[static_cast<std::size_t>(which)];
      TensorView view;
      view.data = plain.data();
      view.dtype = config.dtype;
      view.rows = matrix.outputs;
      view.cols = matrix.shape.inner;
      fill(experts_in[static_cast<std::size_t>(slot)], which, view);
      matrix.pack(slot, plain.data());
    }
  }
}

experts::Block GatedMlp::State::block_of(ConstTensorView rows, std::int64_t begin,
                                         std::int64_t count) {
  experts::Block block{.chunks = {}, .num_rows = count};
  const bool tight = rows.pitch() == row_bytes();
  for (std::int64_t first = 0; first < count; first += kPanelRows) {
    auto& chunk = block.chunks[static_cast<std::size_t>(first / kPanelRows)];
    if (tight && first + kPanelRows <= count) {
      chunk = rows.row(begin + first);
      continue;
    }
    std::byte* to = staged.data() + first * row_bytes();
    chunk = to;
    const std::int64_t end = std::min(first + kPanelRows, count);
    for (std::int64_t row = first; row < end; ++row, to += row_bytes()) {
      std::memcpy(to, rows.row(begin + row), static_cast<std::size_t>(row_bytes()));
    }
  }
  return block;
}

experts::Block GatedMlp::State::gathered_block(ConstTensorView rows,
                                               std::span<const std::int32_t> gather) {
  experts::Block block{.chunks = {}, .num_rows = static_cast<std::int64_t>(gather.size())};
  std::byte* to = staged.data();
  for (std::size_t i = 0; i < gather.size(); ++i, to += row_bytes()) {
    if (i % kPanelRows == 0) block.chunks[i / kPanelRows] = to;
    std::memcpy(to, rows.row(gather[i]), static_cast<std::size_t>(row_bytes()));
  }
  return block;
}

template <typename Fn>
void GatedMlp::State::for_panels(std::int64_t num_panels, const Fn& fn) {
  // Team::split() does not spread fewer items than threads.
  const auto items = std::max<std::int64_t>(num_panels, config.num_threads);
  team.split(items, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t panel = begin; panel < std::min(end, num_panels); ++panel) fn(panel);
  });
}

void GatedMlp::State::run(std::int64_t slot, const experts::Block& block, TensorView out,
                          std::int64_t first_out) {
  for_panels(gate.num_panels, [&](std::int64_t panel) { run_inward(slot, block, panel); });
  for_panels(down.num_panels,
             [&](std::int64_t panel) { run_outward(slot, block.num_rows, panel, out, first_out); });
}

// silu(gate) * up for the columns of one panel, all rows past `gate` before the first meets `up`.
void GatedMlp::State::run_inward(std::int64_t slot, const experts::Block& block,
                                 std::int64_t panel) {
  const std::int64_t cols = gate.shape.cols;
  float* const gate_sums = reinterpret_cast<float*>(gates.data()) + panel * kBlockRows * cols;
  alignas(64) float up_sums[kPanelRows * kMaxPanelCols];
  for (std::int64_t first = 0; first < block.num_rows; first += kPanelRows) {
    inward->multiply(block.chunks[static_cast<std::size_t>(first / kPanelRows)],
                     std::min(kPanelRows, block.num_rows - first), gate.panel(slot, panel),
                     gate_sums + first * cols);
  }
  const std::int64_t element = dtype_bytes(config.dtype);
  std::byte* const out = activations.data() + panel * cols * element;
  for (std::int64_t first = 0; first < block.num_rows; first += kPanelRows) {
    const std::int64_t num_rows = std::min(kPanelRows, block.num_rows - first);
    inward->multiply(block.chunks[static_cast<std::size_t>(first / kPanelRows)], num_rows,
                     up.panel(slot, panel), up_sums);
    for (std::int64_t row = 0; row < num_rows; ++row) {
      const float* const g = gate_sums + (first + row) * cols;
      const float* const u = up_sums + row * cols;
      with_elements(config.dtype, out + (first + row) * config.expert_hidden * element,
                    [&](auto* to) {
                      for (std::int64_t c = 0; c < gate.cols_of(panel); ++c) {
                        store(experts::silu_times(g[c], u[c]), to + c);
                      }
                    });
    }
  }
}

void GatedMlp::State::run_outward(std::int64_t slot, std::int64_t num_rows, std::int64_t panel,
                                  TensorView out, std::int64_t first_out) {
  const std::int64_t cols = down.shape.cols;
  const std::int64_t element = dtype_bytes(config.dtype);
  alignas(64) float sums[kPanelRows * kMaxPanelCols];
  for (std::int64_t first = 0; first < num_rows; first += kPanelRows) {
    const std::int64_t here = std::min(kPanelRows, num_rows - first);
    outward->multiply(activations.data() + first * config.expert_hidden * element, here,
                      down.panel(slot, panel), sums);
    for (std::int64_t row = 0; row < here; ++row) {
      const float* const from = sums + row * cols;
      with_elements(config.dtype, out.row(first_out + first + row) + panel * cols * element,
                    [&](auto* to) {
                      for (std::int64_t c = 0; c < down.cols_of(panel); ++c) store(from[c], to + c);
                    });
    }
  }
}

}  // namespace wherry
