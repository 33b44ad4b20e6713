// What stands around the multiplications of stage 4 on a GPU. Stream-ordered; legal in a captured graph.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "wherry/exchange.hpp"

namespace wherry::kernels::cuda {

// Rows with a pitch. DType::bf16 or f32.
struct RowsAt {
  std::byte* data;
  std::uint64_t pitch;
};

// out[i, :] = silu(gate[i, :]) * up[i, :] for `rows` rows. gate_up [rows, 2 * width]: gate, then up. Width
// is a multiple of 8, pitches and addresses of 16 bytes.
cudaError_t launch_silu_times(DType dtype, RowsAt gate_up, RowsAt out, std::int64_t rows,
                              std::int64_t width, cudaStream_t stream);

// to[at] = from[gather[at]] for at in [0, rows); a negative row is left out (padding).
cudaError_t launch_gather(RowsAt from, RowsAt to, const std::int32_t* gather, std::int64_t rows,
                          std::uint64_t row_bytes, cudaStream_t stream);

// out[row] = sum over the row's choices on this rank, in k order, of weight * results[position], by fp32
// fused multiply-add from 0, rounded once. choices [rows, topk]; `results` 16-byte pitch and address.
cudaError_t launch_sum_choices(DType dtype, RowsAt results, RowsAt out,
                               const Received::TokenChoice* choices, int topk, std::int64_t rows,
                               std::uint64_t row_bytes, cudaStream_t stream);

}  // namespace wherry::kernels::cuda
