// Kernels that fill and compare rows, by the oracle's functions, and the checks of a Cluster.
#include "cluster_local.hpp"

namespace wherry::bench {

namespace cuda = kernels::cuda;

namespace {

constexpr int kThreads = 256;

__global__ void fill_rows(std::byte* x, DType dtype, int tokens, int hidden, int set, int rank) {
  for (int token = static_cast<int>(blockIdx.x); token < tokens;
       token += static_cast<int>(gridDim.x)) {
    for (int column = static_cast<int>(threadIdx.x); column < hidden; column += kThreads) {
      store_bits(dtype, x, static_cast<std::size_t>(token) * hidden + column,
                 payload(dtype, set, rank, token, column));
    }
  }
}

__device__ void note(Mismatches* found, unsigned long long* counter, int kind, int rank, int row,
                     int column, int expected, int got) {
  if (atomicAdd(counter, 1ULL) != 0) return;
  const int values[6] = {kind, rank, row, column, expected, got};
  for (int i = 0; i < 6; ++i) found->first[i] = values[i];
}

struct ExpertsArgs {
  layout::WindowLayout layout;
  std::byte* window;
  const Origin* origins;
  int num_origins, rank, generation, set, hidden, topk, experts;
  DType dtype;
  std::uint64_t scale_pitch;  // 0: rows are not quantised
  bool zero_padding, entries;
  const layout::TokenEntry* expected_entries;
  int num_token_rows;
  Mismatches* found;
};

__device__ void check_quantised(const ExpertsArgs& a, int row, const Origin& origin,
                                const std::byte* bytes) {
  const auto* scales = reinterpret_cast<const float*>(
      a.window + a.layout.scale_plane(static_cast<std::uint64_t>(a.generation)) +
      static_cast<std::uint64_t>(row) * a.scale_pitch);
  for (int block = static_cast<int>(threadIdx.x); block < (a.hidden + 127) / 128;
       block += kThreads) {
    const int end = min(a.hidden, block * 128 + 128);
    float largest = 0.0F;
    for (int c = block * 128; c < end; ++c) {
      largest = fmaxf(
          largest, fabsf(widen(a.dtype, payload(a.dtype, a.set, origin.source, origin.token, c))));
    }
    const float scale = largest == 0.0F ? 1.0F : __fdiv_rn(largest, 448.0F);
    const float stored = scales[block];
    if (__float_as_int(scale) != __float_as_int(stored)) {
      note(a.found, &a.found->rows, 1, a.rank, row, block, __float_as_int(scale),
           __float_as_int(stored));
    }
    for (int c = block * 128; c < end; ++c) {
      const float x = widen(a.dtype, payload(a.dtype, a.set, origin.source, origin.token, c));
      const int expected = to_e4m3(__fdiv_rn(x, scale));
      const int got = static_cast<int>(bytes[c]);
      if (expected != got) note(a.found, &a.found->rows, 2, a.rank, row, c, expected, got);
    }
  }
}

// Compares each received row with its origin's payload and writes what its expert makes of it.
__global__ void run_experts(ExpertsArgs a) {
  for (int row = static_cast<int>(blockIdx.x); row < a.num_origins;
       row += static_cast<int>(gridDim.x)) {
    const Origin origin = a.origins[row];
    const auto at = static_cast<std::uint64_t>(row);
    const auto generation = static_cast<std::uint64_t>(a.generation);
    const std::byte* bytes = a.window + a.layout.row(generation, at);
    std::byte* out = a.window + a.layout.result(generation, at);
    const bool e4m3 = a.scale_pitch != 0;
    if (origin.source < 0 && !a.zero_padding) continue;
    if (origin.source >= 0 && e4m3) check_quantised(a, row, origin, bytes);
    for (int c = static_cast<int>(threadIdx.x); c < a.hidden; c += kThreads) {
      if (origin.source < 0) {
        const auto got = static_cast<int>(load_bits(a.dtype, bytes, static_cast<std::size_t>(c)));
        if (got != 0) note(a.found, &a.found->rows, 3, a.rank, row, c, 0, got);
        continue;
      }
      const auto column = static_cast<std::size_t>(c);
      const std::uint32_t expected = payload(a.dtype, a.set, origin.source, origin.token, c);
      const std::uint32_t got = e4m3 ? expected : load_bits(a.dtype, bytes, column);
      if (got != expected) {
        note(a.found, &a.found->rows, 0, a.rank, row, c, static_cast<int>(expected),
             static_cast<int>(got));
      }
      store_bits(a.dtype, out, column, got ^ expert_bits(a.dtype, origin.expert));
    }
  }
  if (!a.entries) return;
  const int threads = static_cast<int>(gridDim.x) * kThreads;
  for (int i = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
       i < a.num_token_rows * a.topk; i += threads) {
    const auto* got = reinterpret_cast<const layout::TokenEntry*>(
        a.window + a.layout.token_entries(static_cast<std::uint64_t>(a.generation),
                                          static_cast<std::uint64_t>(i / a.topk)));
    const layout::TokenEntry& entry = got[i % a.topk];
    const layout::TokenEntry& expected = a.expected_entries[i];
    if (entry.position != expected.position || entry.weight != expected.weight) {
      note(a.found, &a.found->entries, 4, a.rank, i / a.topk, i % a.topk, expected.position,
           entry.position);
    }
  }
}

__global__ void compare_sums(const std::byte* out, SumRule rule, int rank, int tokens, int hidden,
                             const std::int32_t* dest, const std::int32_t* slot,
                             const float* weights, Mismatches* found) {
  for (int token = static_cast<int>(blockIdx.x); token < tokens;
       token += static_cast<int>(gridDim.x)) {
    const int first = token * rule.topk;
    for (int c = static_cast<int>(threadIdx.x); c < hidden; c += kThreads) {
      const std::uint32_t expected =
          expected_sum(rule, rank, token, c, dest + first, slot + first, weights + first);
      const std::uint32_t got =
          load_bits(rule.dtype, out, static_cast<std::size_t>(token) * hidden + c);
      if (got != expected) {
        note(found, &found->sums, 5, rank, token, c, static_cast<int>(expected),
             static_cast<int>(got));
      }
    }
  }
}

}  // namespace

void fill_payload(std::byte* x, DType dtype, int tokens, int hidden, int set, int rank,
                  cudaStream_t stream) {
  fill_rows<<<256, kThreads, 0, stream>>>(x, dtype, tokens, hidden, set, rank);
  CUDA_OK(cudaGetLastError());
}

void Cluster::experts(int generation, int set) {
  for (Local& local : locals_) {
    const Local::Set& s = local.sets[static_cast<std::size_t>(set)];
    ExpertsArgs args{layout_,
                     windows_[static_cast<std::size_t>(local.rank)],
                     s.origins,
                     s.num_origins,
                     local.rank,
                     generation,
                     set,
                     shape_.hidden,
                     shape_.topk,
                     shape_.experts,
                     shape_.dtype,
                     shape_.scale_pitch(),
                     shape_.layout == Layout::grouped,
                     shape_.layout != Layout::slots,
                     s.entries,
                     s.num_token_rows,
                     mismatches_};
    run_experts<<<512, kThreads, 0, stream_>>>(args);
    CUDA_OK(cudaGetLastError());
  }
}

void Cluster::check_sums(int set) {
  const SumRule rule{shape_.layout, shape_.reduction, shape_.dtype, shape_.ranks,
                     shape_.topk,   shape_.experts,   set};
  for (Local& local : locals_) {
    const Local::Set& s = local.sets[static_cast<std::size_t>(set)];
    compare_sums<<<512, kThreads, 0, stream_>>>(local.out, rule, local.rank,
                                                shape_.tokens_of(local.rank), shape_.hidden, s.dest,
                                                s.slot, s.weights, mismatches_);
    CUDA_OK(cudaGetLastError());
  }
}

Mismatches Cluster::mismatches() {
  Mismatches found;
  CUDA_OK(cudaStreamSynchronize(stream_));
  CUDA_OK(cudaMemcpy(&found, mismatches_, sizeof(found), cudaMemcpyDeviceToHost));
  return found;
}

bool Cluster::plan_is_right(int generation, int set) {
  CUDA_OK(cudaStreamSynchronize(stream_));
  const auto same = [](const char* name, int rank, const auto* on_device, const auto& expected) {
    auto found = expected;
    CUDA_OK(cudaMemcpy(found.data(), on_device, found.size() * sizeof(found[0]),
                       cudaMemcpyDeviceToHost));
    for (std::size_t i = 0; i < expected.size(); ++i) {
      if (found[i] == expected[i]) continue;
      std::printf("rank %d: %s[%zu] is %d, expected %d\n", rank, name, i,
                  static_cast<int>(found[i]), static_cast<int>(expected[i]));
      return false;
    }
    return true;
  };
  bool right = true;
  for (Local& local : locals_) {
    const RankPlan& e = plans_[static_cast<std::size_t>(set)][static_cast<std::size_t>(local.rank)];
    const cuda::PlanArrays& p = local.plans[static_cast<std::size_t>(generation)];
    const int r = local.rank;
    right = same("dest", r, p.dest, e.dest) && same("slot", r, p.slot, e.slot) &&
            same("row", r, p.row, e.row) && same("token_row", r, p.token_row, e.token_row) &&
            same("repeat", r, p.repeat, e.repeat) && same("weight", r, p.weight, e.weights) &&
            same("slot_counts", r, p.slot_counts, e.slot_counts) &&
            same("slot_begin", r, p.slot_begin, e.slot_begin) &&
            same("token_rows_from", r, p.token_rows_from, e.token_rows_from) &&
            same("token_rows_to", r, p.token_rows_to, e.token_rows_to) && right;
  }
  return right;
}

bool Cluster::sums_are_nan() {
  CUDA_OK(cudaStreamSynchronize(stream_));
  for (Local& local : locals_) {
    const std::size_t elements = static_cast<std::size_t>(shape_.tokens_of(local.rank)) *
                                 static_cast<std::size_t>(shape_.hidden);
    const std::uint32_t nan = shape_.dtype == DType::f32   ? 0x7FC00000U
                              : shape_.dtype == DType::f16 ? 0x7E00U
                                                           : 0x7FC0U;
    std::vector<std::byte> out(elements * static_cast<std::size_t>(dtype_bytes(shape_.dtype)));
    CUDA_OK(cudaMemcpy(out.data(), local.out, out.size(), cudaMemcpyDeviceToHost));
    for (std::size_t i = 0; i < elements; ++i) {
      const std::uint32_t element = load_bits(shape_.dtype, out.data(), i);
      if (element == nan) continue;
      std::printf("rank %d: %04x where the one NaN belongs\n", local.rank, element);
      return false;
    }
  }
  return true;
}

bool Cluster::sums_are_right_on_host(int set) {
  CUDA_OK(cudaStreamSynchronize(stream_));
  const SumRule rule{shape_.layout, shape_.reduction, shape_.dtype, shape_.ranks,
                     shape_.topk,   shape_.experts,   set};
  for (Local& local : locals_) {
    const RankPlan& p = plans_[static_cast<std::size_t>(set)][static_cast<std::size_t>(local.rank)];
    const int tokens = shape_.tokens_of(local.rank);
    const std::size_t elements =
        static_cast<std::size_t>(tokens) * static_cast<std::size_t>(shape_.hidden);
    std::vector<std::byte> out(elements * static_cast<std::size_t>(dtype_bytes(shape_.dtype)));
    CUDA_OK(cudaMemcpy(out.data(), local.out, out.size(), cudaMemcpyDeviceToHost));
    for (std::size_t i = 0; i < elements; ++i) {
      const auto token = i / static_cast<std::size_t>(shape_.hidden);
      const auto column = static_cast<int>(i % static_cast<std::size_t>(shape_.hidden));
      const std::size_t first = token * static_cast<std::size_t>(shape_.topk);
      const std::uint32_t expected =
          expected_sum(rule, local.rank, static_cast<int>(token), column, p.dest.data() + first,
                       p.slot.data() + first, p.weights.data() + first);
      const std::uint32_t found = load_bits(shape_.dtype, out.data(), i);
      if (found == expected) continue;
      std::printf("rank %d token %zu column %d: sum is %04x, expected %04x (host)\n", local.rank,
                  token, column, found, expected);
      return false;
    }
  }
  return true;
}

}  // namespace wherry::bench
