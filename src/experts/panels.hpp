// How the experts multiply: every weight matrix is cut into panels of some output columns, and a
// panel meets 32 rows at a time.
//
// The number of rows in a multiplication never varies, so a row's result cannot depend on how many
// rows stand beside it: oneDNN blocks the inner dimension differently for different numbers of rows
// (measured: at inner 7168, 32 and 48 rows give other bits), and building a kernel for every number
// costs 0.3 to 5 ms each. A panel stays in the L2 cache while all rows pass it: 950 GFLOP/s a core
// (Xeon with AMX, 7168 x 64, 32 rows, all of it cached) against 560 with the matrix in one piece.
// A whole MLP over many rows reaches 300 to 400 on a busy machine, since every panel fetches the
// rows from L3 again; panels that also split the inner dimension would fetch a quarter of that.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "wherry/types.hpp"

namespace wherry::experts {

inline constexpr std::int64_t kPanelRows = 32;      // rows of one multiplication
inline constexpr std::int64_t kMaxPanelCols = 512;  // so that a result of it fits on the stack

struct PanelShape {
  std::int64_t inner = 0;  // elements of a row
  std::int64_t cols = 0;   // results of a row, a multiple of 64
  DType dtype = DType::bf16;

  // As many columns as keep a panel within 1 MiB, half of an L2 cache.
  [[nodiscard]] static PanelShape choose(std::int64_t inner, std::int64_t outputs, DType dtype) {
    const std::int64_t fit = (std::int64_t{1} << 20) / (inner * dtype_bytes(dtype)) / 64 * 64;
    const std::int64_t all = (outputs + 63) / 64 * 64;
    return {inner, std::clamp<std::int64_t>(std::min(fit, all), 64, kMaxPanelCols), dtype};
  }
};

// Multiplies rows by panels of one shape. Stateless once made: any thread may call it.
class PanelMatmul {
 public:
  virtual ~PanelMatmul() = default;
  // Of a packed panel, a multiple of 64.
  [[nodiscard]] virtual std::size_t panel_bytes() const = 0;
  // weights [cols, inner], tightly packed -> panel. Both aligned to 64 bytes.
  virtual void pack(const std::byte* weights, std::byte* panel) const = 0;
  // result [32, cols] = rows [32, inner] * panel, in fp32. Only the first num_rows rows of result
  // must be right, but all 32 rows are readable and writable.
  virtual void multiply(const std::byte* rows, std::int64_t num_rows, const std::byte* panel,
                        float* result) const = 0;
};

// bf16 or f32.
[[nodiscard]] std::unique_ptr<PanelMatmul> make_plain_matmul(const PanelShape& shape);

// bf16. Without oneDNN in this build, or with a processor it has no code for, null; `reason` then
// says why, and otherwise what runs. Throws out_of_memory.
[[nodiscard]] std::unique_ptr<PanelMatmul> make_onednn_matmul(const PanelShape& shape,
                                                              std::string& reason);

}  // namespace wherry::experts
