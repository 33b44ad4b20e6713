// Experts on the CPU: the packed weights of a rank and the walk of rows through them.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "experts/mlp.hpp"
#include "experts/pages.hpp"
#include "experts/panels.hpp"
#include "support/team.hpp"
#include "wherry/experts.hpp"

namespace wherry::experts {

// Rows that pass a panel while it is in the cache: enough that reading the panel does not count.
inline constexpr std::int64_t kBlockRows = 16 * kPanelRows;

// One weight matrix of every expert, in panels: expert s has the panels [s*num_panels, ...).
struct PackedMatrix {
  PanelShape shape;
  const PanelMatmul* matmul = nullptr;
  std::int64_t outputs = 0;     // columns that mean something; the last panel is padded with zeros
  std::int64_t num_panels = 0;  // of one expert
  std::byte* first_panel = nullptr;

  [[nodiscard]] const std::byte* panel(std::int64_t slot, std::int64_t at) const noexcept {
    return first_panel + static_cast<std::size_t>(slot * num_panels + at) * matmul->panel_bytes();
  }
  [[nodiscard]] std::int64_t cols_of(std::int64_t at) const noexcept {
    return std::min(shape.cols, outputs - at * shape.cols);
  }
  // Packs weights [outputs, inner] of one expert.
  void pack(std::int64_t slot, const std::byte* weights) const;
};

// Up to kBlockRows rows of one expert, as tightly packed chunks of kPanelRows readable rows.
struct Block {
  std::array<const std::byte*, kBlockRows / kPanelRows> chunks;
  std::int64_t num_rows = 0;
};

class CpuMlp final : public Mlp {
 public:
  CpuMlp(const ExpertsConfig& config_in, std::span<const int> experts_in, const WeightSource& fill);

  [[nodiscard]] std::uint64_t weight_bytes() const noexcept override { return weights_.size(); }
  void forward(ConstTensorView rows, std::span<const std::int64_t> slot_begin,
               std::span<const std::int64_t> slot_counts, TensorView out) override;
  void forward_gathered(const Received& received, TensorView out) override;

 private:
  void choose_implementation();
  void pack_experts(std::span<const int> experts_in, const WeightSource& fill);
  // out.row(first_out + i) = MLP of `slot` over row i of the block.
  void run(std::int64_t slot, const Block& block, TensorView out, std::int64_t first_out);

  // The rows [begin, begin + count) of `rows`, copied only where oneDNN cannot read them in place.
  [[nodiscard]] Block block_of(ConstTensorView rows, std::int64_t begin, std::int64_t count);
  [[nodiscard]] Block gathered_block(ConstTensorView rows, std::span<const std::int32_t> gather);

  std::unique_ptr<PanelMatmul> inward_, outward_;  // hidden -> expert_hidden, and back
  PackedMatrix gate_, up_, down_;
  Pages weights_;
  Pages staged_;                    // [kBlockRows, hidden], rows that had to be copied
  Pages gates_;                     // fp32, per panel of `gate` [kBlockRows, cols]
  Pages activations_;               // [kBlockRows, expert_hidden]
  std::vector<std::byte> results_;  // forward_gathered: one result per grouped position
  Team team_;

  void run_inward(std::int64_t slot, const Block& block, std::int64_t panel);
  void run_outward(std::int64_t slot, std::int64_t num_rows, std::int64_t panel, TensorView out,
                   std::int64_t first_out);
  // fn(panel) for every panel, spread over the team_.
  template <typename Fn>
  void for_panels(std::int64_t num_panels, const Fn& fn);
};

}  // namespace wherry::experts
