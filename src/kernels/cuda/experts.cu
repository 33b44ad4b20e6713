// Stage 4, experts: the gated activation between the two multiplications, and for rows that are gathered
// their way there and the sum of a row's choices.
#include "kernels/cuda/experts.hpp"

#include <algorithm>

#include "kernels/cuda/row_sum.cuh"

namespace wherry::kernels::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpLanes;
constexpr std::int64_t kMaxBlocks = 4096;

unsigned blocks_for(std::int64_t items, std::int64_t of_block) {
  const std::int64_t blocks = (items + of_block - 1) / of_block;
  return static_cast<unsigned>(std::clamp<std::int64_t>(blocks, 1, kMaxBlocks));
}

// A thread 16 bytes.
template <typename Element>
__global__ void __launch_bounds__(kThreads)
    silu_times(RowsAt gate_up, RowsAt out, std::int64_t rows, std::uint32_t width) {
  constexpr int kOfVector = Element::kOfVector;
  const std::uint32_t vectors = width / kOfVector;
  const std::int64_t items = rows * vectors;
  for (std::int64_t item = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; item < items;
       item += std::int64_t{gridDim.x} * kThreads) {
    const std::int64_t row = item / vectors;
    const auto vector = static_cast<std::uint32_t>(item % vectors);
    const auto* from = reinterpret_cast<const uint4*>(gate_up.data + row * gate_up.pitch);
    float gate[kOfVector];
    float up[kOfVector];
    Element::widen(__ldcs(from + vector), gate);
    Element::widen(__ldcs(from + vectors + vector), up);
#pragma unroll
    for (int i = 0; i < kOfVector; ++i) {
      gate[i] = __fmul_rn(__fdiv_rn(gate[i], __fadd_rn(1.0F, expf(-gate[i]))), up[i]);
    }
    reinterpret_cast<uint4*>(out.data + row * out.pitch)[vector] = round_vector<Element>(gate);
  }
}

// A warp a row.
template <typename Unit>
__global__ void __launch_bounds__(kThreads)
    gather(RowsAt from, RowsAt to, const std::int32_t* rows_of, std::int64_t rows,
           std::uint32_t units) {
  for (std::int64_t at = std::int64_t{blockIdx.x} * kWarps + warp_index(); at < rows;
       at += std::int64_t{gridDim.x} * kWarps) {
    const std::int32_t row = rows_of[at];
    if (row < 0) continue;
    const auto* source = reinterpret_cast<const Unit*>(from.data + row * from.pitch);
    auto* target = reinterpret_cast<Unit*>(to.data + at * to.pitch);
    for (auto i = static_cast<std::uint32_t>(lane_index()); i < units; i += kWarpLanes) {
      target[i] = source[i];
    }
  }
}

// A warp a row.
template <typename Element>
__global__ void __launch_bounds__(kThreads)
    sum_choices(RowsAt results, RowsAt out, const Received::TokenChoice* choices, int topk,
                std::int64_t rows, std::uint32_t row_bytes) {
  const std::uint32_t vectors = (row_bytes + 15) / 16;
  for (std::int64_t row = std::int64_t{blockIdx.x} * kWarps + warp_index(); row < rows;
       row += std::int64_t{gridDim.x} * kWarps) {
    const Received::TokenChoice* mine = choices + row * topk;
    std::byte* to = out.data + row * out.pitch;
    const bool aligned = (reinterpret_cast<std::uintptr_t>(to) | row_bytes) % 16 == 0;
    const SumTarget target{to, aligned, row_bytes, 0, vectors, nullptr};
    for (auto vector = static_cast<std::uint32_t>(lane_index()); vector < vectors;
         vector += kWarpLanes) {
      float sum[Element::kOfVector] = {};
      for (int k = 0; k < topk; ++k) {
        const Received::TokenChoice choice = mine[k];
        if (choice.local_slot < 0) continue;
        const std::byte* from = results.data + choice.position * results.pitch;
        add_vector<Element, true>(sum, reinterpret_cast<const uint4*>(from)[vector], choice.weight);
      }
      store_sum<Element>(target, vector, sum);
    }
  }
}

}  // namespace

cudaError_t launch_silu_times(DType dtype, RowsAt gate_up, RowsAt out, std::int64_t rows,
                              std::int64_t width, cudaStream_t stream) {
  if (rows == 0) return cudaSuccess;
  const auto wide = static_cast<std::uint32_t>(width);
  const auto run = [&]<typename Element>(Element) {
    const unsigned blocks = blocks_for(rows * (width / Element::kOfVector), kThreads);
    silu_times<Element><<<blocks, kThreads, 0, stream>>>(gate_up, out, rows, wide);
  };
  dtype == DType::bf16 ? run(Bf16Element{}) : run(F32Element{});
  return cudaGetLastError();
}

cudaError_t launch_gather(RowsAt from, RowsAt to, const std::int32_t* rows_of, std::int64_t rows,
                          std::uint64_t row_bytes, cudaStream_t stream) {
  if (rows == 0) return cudaSuccess;
  const auto run = [&]<typename Unit>(Unit) {
    gather<Unit><<<blocks_for(rows, kWarps), kThreads, 0, stream>>>(
        from, to, rows_of, rows, static_cast<std::uint32_t>(row_bytes / sizeof(Unit)));
  };
  const std::uint64_t odd = 16 | row_bytes | from.pitch | to.pitch |
                            reinterpret_cast<std::uintptr_t>(from.data) |
                            reinterpret_cast<std::uintptr_t>(to.data);
  if (odd % 16 == 0) {
    run(uint4{});
  } else if (odd % 4 == 0) {
    run(std::uint32_t{});
  } else {
    run(std::uint16_t{});
  }
  return cudaGetLastError();
}

cudaError_t launch_sum_choices(DType dtype, RowsAt results, RowsAt out,
                               const Received::TokenChoice* choices, int topk, std::int64_t rows,
                               std::uint64_t row_bytes, cudaStream_t stream) {
  if (rows == 0) return cudaSuccess;
  const auto run = [&]<typename Element>(Element) {
    sum_choices<Element><<<blocks_for(rows, kWarps), kThreads, 0, stream>>>(
        results, out, choices, topk, rows, static_cast<std::uint32_t>(row_bytes));
  };
  dtype == DType::bf16 ? run(Bf16Element{}) : run(F32Element{});
  return cudaGetLastError();
}

}  // namespace wherry::kernels::cuda
