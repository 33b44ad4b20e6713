#include "experts/cpu_mlp.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "experts/activation.hpp"
#include "experts/sum_choices.hpp"
#include "kernels/numerics.hpp"
#include "support/build_info.hpp"
#include "support/check.hpp"

namespace wherry::experts {
namespace {

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

// fn(slot, first row, number of rows) for blocks of at most kBlockRows rows.
template <typename Fn>
void for_blocks(std::span<const std::int64_t> begin, std::span<const std::int64_t> counts,
                const Fn& fn) {
  for (std::size_t slot = 0; slot < counts.size(); ++slot) {
    for (std::int64_t done = 0; done < counts[slot]; done += kBlockRows) {
      fn(static_cast<std::int64_t>(slot), begin[slot] + done,
         std::min(kBlockRows, counts[slot] - done));
    }
  }
}

}  // namespace

#if !WHERRY_HAS_CPU_EXPERTS
std::unique_ptr<PanelMatmul> make_onednn_matmul(const PanelShape&, std::string& reason) {
  reason = fmt::format("this build has no oneDNN: {}", build_info::reason_of("WHERRY_CPU_EXPERTS"));
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

CpuMlp::CpuMlp(const ExpertsConfig& config_in, std::span<const int> experts_in,
               const WeightSource& fill)
    : Mlp(config_in, experts_in.size()),
      team_(config_in.num_threads) {
  choose_implementation();
  pack_experts(experts_in, fill);
  const auto elements = static_cast<std::size_t>(kBlockRows * dtype_bytes(config.dtype));
  staged_ = Pages(elements * static_cast<std::size_t>(config.hidden), "rows of the experts");
  activations_ = Pages(elements * static_cast<std::size_t>(config.expert_hidden),
                       "activations of the experts");
  gates_ = Pages(
      static_cast<std::size_t>(kBlockRows * gate_.num_panels * gate_.shape.cols) * sizeof(float),
      "activations of the experts");
}

void CpuMlp::choose_implementation() {
  const auto in = PanelShape::choose(config.hidden, config.expert_hidden, config.dtype);
  const auto out = PanelShape::choose(config.expert_hidden, config.hidden, config.dtype);
  implementation = {"plain", "asked for"};
  if (config.implementation != "plain") {
    if (config.dtype == DType::bf16) {
      inward_ = make_onednn_matmul(in, implementation.reason);
      if (inward_) outward_ = make_onednn_matmul(out, implementation.reason);
    } else {
      implementation.reason = "oneDNN is used for bf16 only";
    }
    if (outward_) implementation.name = "onednn";
    WHERRY_CHECK(outward_ || config.implementation.empty(), ErrorCode::unsupported,
                 (Error::Where{Stage::experts, -1, -1}), "the experts cannot run on oneDNN: {}",
                 implementation.reason);
  }
  if (!outward_) {
    inward_ = make_plain_matmul(in);
    outward_ = make_plain_matmul(out);
  }
  gate_ = up_ = {in, inward_.get(), config.expert_hidden,
                 (config.expert_hidden + in.cols - 1) / in.cols, nullptr};
  down_ = {out, outward_.get(), config.hidden, (config.hidden + out.cols - 1) / out.cols, nullptr};
}

void CpuMlp::pack_experts(std::span<const int> experts_in, const WeightSource& fill) {
  const std::array<PackedMatrix*, 3> matrices = {&gate_, &up_, &down_};
  std::size_t total = 0;
  for (const PackedMatrix* matrix : matrices) {
    total +=
        static_cast<std::size_t>(num_slots * matrix->num_panels) * matrix->matmul->panel_bytes();
  }
  weights_ = Pages(total, "the weights of the experts");
  std::byte* next = weights_.data();
  for (PackedMatrix* matrix : matrices) {
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
      const PackedMatrix& matrix = *matrices[static_cast<std::size_t>(which)];
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

Block CpuMlp::block_of(ConstTensorView rows, std::int64_t begin, std::int64_t count) {
  Block block{.chunks = {}, .num_rows = count};
  const bool tight = rows.pitch() == row_bytes();
  for (std::int64_t first = 0; first < count; first += kPanelRows) {
    auto& chunk = block.chunks[static_cast<std::size_t>(first / kPanelRows)];
    if (tight && first + kPanelRows <= count) {
      chunk = rows.row(begin + first);
      continue;
    }
    std::byte* to = staged_.data() + first * row_bytes();
    chunk = to;
    const std::int64_t end = std::min(first + kPanelRows, count);
    for (std::int64_t row = first; row < end; ++row, to += row_bytes()) {
      std::memcpy(to, rows.row(begin + row), static_cast<std::size_t>(row_bytes()));
    }
  }
  return block;
}

Block CpuMlp::gathered_block(ConstTensorView rows, std::span<const std::int32_t> gather) {
  Block block{.chunks = {}, .num_rows = static_cast<std::int64_t>(gather.size())};
  std::byte* to = staged_.data();
  for (std::size_t i = 0; i < gather.size(); ++i, to += row_bytes()) {
    if (i % kPanelRows == 0) block.chunks[i / kPanelRows] = to;
    std::memcpy(to, rows.row(gather[i]), static_cast<std::size_t>(row_bytes()));
  }
  return block;
}

template <typename Fn>
void CpuMlp::for_panels(std::int64_t num_panels, const Fn& fn) {
  // Team::split() does not spread fewer items than threads.
  const auto items = std::max<std::int64_t>(num_panels, config.num_threads);
  team_.split(items, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t panel = begin; panel < std::min(end, num_panels); ++panel) fn(panel);
  });
}

void CpuMlp::run(std::int64_t slot, const Block& block, TensorView out, std::int64_t first_out) {
  for_panels(gate_.num_panels, [&](std::int64_t panel) { run_inward(slot, block, panel); });
  for_panels(down_.num_panels,
             [&](std::int64_t panel) { run_outward(slot, block.num_rows, panel, out, first_out); });
}

// silu(gate) * up for the columns of one panel, all rows past `gate` before the first meets `up`.
void CpuMlp::run_inward(std::int64_t slot, const Block& block, std::int64_t panel) {
  const std::int64_t cols = gate_.shape.cols;
  float* const gate_sums = reinterpret_cast<float*>(gates_.data()) + panel * kBlockRows * cols;
  alignas(64) float up_sums[kPanelRows * kMaxPanelCols];
  for (std::int64_t first = 0; first < block.num_rows; first += kPanelRows) {
    inward_->multiply(block.chunks[static_cast<std::size_t>(first / kPanelRows)],
                      std::min(kPanelRows, block.num_rows - first), gate_.panel(slot, panel),
                      gate_sums + first * cols);
  }
  const std::int64_t element = dtype_bytes(config.dtype);
  std::byte* const out = activations_.data() + panel * cols * element;
  for (std::int64_t first = 0; first < block.num_rows; first += kPanelRows) {
    const std::int64_t num_rows = std::min(kPanelRows, block.num_rows - first);
    inward_->multiply(block.chunks[static_cast<std::size_t>(first / kPanelRows)], num_rows,
                      up_.panel(slot, panel), up_sums);
    for (std::int64_t row = 0; row < num_rows; ++row) {
      const float* const g = gate_sums + (first + row) * cols;
      const float* const u = up_sums + row * cols;
      with_elements(config.dtype, out + (first + row) * config.expert_hidden * element,
                    [&](auto* to) {
                      for (std::int64_t c = 0; c < gate_.cols_of(panel); ++c) {
                        store(silu_times(g[c], u[c]), to + c);
                      }
                    });
    }
  }
}

void CpuMlp::run_outward(std::int64_t slot, std::int64_t num_rows, std::int64_t panel,
                         TensorView out, std::int64_t first_out) {
  const std::int64_t cols = down_.shape.cols;
  const std::int64_t element = dtype_bytes(config.dtype);
  alignas(64) float sums[kPanelRows * kMaxPanelCols];
  for (std::int64_t first = 0; first < num_rows; first += kPanelRows) {
    const std::int64_t here = std::min(kPanelRows, num_rows - first);
    outward_->multiply(activations_.data() + first * config.expert_hidden * element, here,
                       down_.panel(slot, panel), sums);
    for (std::int64_t row = 0; row < here; ++row) {
      const float* const from = sums + row * cols;
      with_elements(config.dtype, out.row(first_out + first + row) + panel * cols * element,
                    [&](auto* to) {
                      for (std::int64_t c = 0; c < down_.cols_of(panel); ++c)
                        store(from[c], to + c);
                    });
    }
  }
}

void CpuMlp::forward(ConstTensorView rows, std::span<const std::int64_t> slot_begin,
                     std::span<const std::int64_t> slot_counts, TensorView out) {
  for_blocks(slot_begin, slot_counts,
             [&](std::int64_t slot, std::int64_t first, std::int64_t count) {
               run(slot, block_of(rows, first, count), out, first);
             });
}

void CpuMlp::forward_gathered(const Received& received, TensorView out) {
  const auto positions = static_cast<std::int64_t>(received.gather.size());
  const auto bytes = static_cast<std::size_t>(positions * row_bytes());
  if (results_.size() < bytes) results_.resize(bytes);
  TensorView results;
  results.data = results_.data();
  results.dtype = config.dtype;
  results.rows = positions;
  results.cols = config.hidden;
  for_blocks(received.slot_begin, received.slot_counts,
             [&](std::int64_t slot, std::int64_t first, std::int64_t count) {
               const auto gather = received.gather.subspan(static_cast<std::size_t>(first),
                                                           static_cast<std::size_t>(count));
               run(slot, gathered_block(received.rows, gather), results, first);
             });
  if (received.rows.rows == 0) return;
  const std::size_t topk = received.choices.size() / static_cast<std::size_t>(received.rows.rows);
  team_.split(received.rows.rows, [&](std::int64_t begin, std::int64_t end) {
    std::vector<Term> terms;
    for (std::int64_t row = begin; row < end; ++row) {
      terms.clear();
      for (const Received::TokenChoice& choice :
           received.choices.subspan(static_cast<std::size_t>(row) * topk, topk)) {
        if (choice.local_slot < 0) continue;
        terms.push_back({choice.weight, results.row(choice.position)});
      }
      sum_choices(config.dtype, terms, config.hidden, out.row(row));
    }
  });
}

std::unique_ptr<Mlp> make_cpu_mlp(const ExpertsConfig& config, std::span<const int> experts,
                                  const WeightSource& fill) {
  return std::make_unique<CpuMlp>(config, experts, fill);
}

}  // namespace wherry::experts
