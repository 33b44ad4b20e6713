#include "cluster.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace wherry::bench {

namespace cuda = kernels::cuda;

namespace {

constexpr int kThreads = 256;

// --- Kernels that fill and compare, by the oracle's functions -------------------------------------

__global__ void fill_payload(std::uint16_t* x, int tokens, int hidden, int set, int rank) {
  for (int token = static_cast<int>(blockIdx.x); token < tokens;
       token += static_cast<int>(gridDim.x)) {
    for (int column = static_cast<int>(threadIdx.x); column < hidden; column += kThreads) {
      x[static_cast<std::size_t>(token) * hidden + column] = payload(set, rank, token, column);
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
  bool e4m3, zero_padding, entries;
  const layout::TokenEntry* expected_entries;
  int num_token_rows;
  Mismatches* found;
};

__device__ void check_quantised(const ExpertsArgs& a, int row, const Origin& origin,
                                const std::byte* bytes) {
  for (int block = static_cast<int>(threadIdx.x); block < (a.hidden + 127) / 128;
       block += kThreads) {
    const int end = min(a.hidden, block * 128 + 128);
    float largest = 0.0F;
    for (int c = block * 128; c < end; ++c) {
      largest = fmaxf(largest, fabsf(widen(payload(a.set, origin.source, origin.token, c))));
    }
    const float scale = largest == 0.0F ? 1.0F : __fdiv_rn(largest, 448.0F);
    const float stored = reinterpret_cast<const float*>(bytes + a.hidden)[block];
    if (__float_as_int(scale) != __float_as_int(stored)) {
      note(a.found, &a.found->rows, 1, a.rank, row, block, __float_as_int(scale),
           __float_as_int(stored));
    }
    for (int c = block * 128; c < end; ++c) {
      const float x = widen(payload(a.set, origin.source, origin.token, c));
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
    const auto* in = reinterpret_cast<const std::uint16_t*>(bytes);
    auto* out = reinterpret_cast<std::uint16_t*>(a.window + a.layout.result(generation, at));
    if (origin.source < 0 && !a.zero_padding) continue;
    if (origin.source >= 0 && a.e4m3) check_quantised(a, row, origin, bytes);
    for (int c = static_cast<int>(threadIdx.x); c < a.hidden; c += kThreads) {
      if (origin.source < 0) {
        if (in[c] != 0) note(a.found, &a.found->rows, 3, a.rank, row, c, 0, in[c]);
        continue;
      }
      const std::uint16_t expected = payload(a.set, origin.source, origin.token, c);
      const std::uint16_t got = a.e4m3 ? expected : in[c];
      if (got != expected) note(a.found, &a.found->rows, 0, a.rank, row, c, expected, got);
      out[c] = static_cast<std::uint16_t>(got ^ expert_bits(origin.expert));
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

__global__ void compare_sums(const std::uint16_t* out, SumRule rule, int rank, int tokens,
                             int hidden, const std::int32_t* dest, const std::int32_t* slot,
                             const float* weights, Mismatches* found) {
  for (int token = static_cast<int>(blockIdx.x); token < tokens;
       token += static_cast<int>(gridDim.x)) {
    const int first = token * rule.topk;
    for (int c = static_cast<int>(threadIdx.x); c < hidden; c += kThreads) {
      const std::uint16_t expected =
          expected_sum(rule, rank, token, c, dest + first, slot + first, weights + first);
      const std::uint16_t got = out[static_cast<std::size_t>(token) * hidden + c];
      if (got != expected) note(found, &found->sums, 5, rank, token, c, expected, got);
    }
  }
}

bool sums_partials(const Shape& shape) {
  return shape.layout == Layout::grouped && shape.reduction == Reduction::by_rank && shape.partials;
}
cuda::Sum sum_of(const Shape& shape) {
  if (shape.reduction == Reduction::by_token) return cuda::Sum::choices;
  if (shape.layout == Layout::tokens) return cuda::Sum::token_rows;
  return sums_partials(shape) ? cuda::Sum::partials : cuda::Sum::ranked;
}

__global__ void sleep_for(unsigned nanoseconds) {
  for (unsigned slept = 0; slept < nanoseconds; slept += 1000) __nanosleep(1000);
}

}  // namespace

// --- Memory ---------------------------------------------------------------------------------------

struct Cluster::Local {
  int rank = 0;
  cuda::RankContext context{};
  std::vector<cuda::PlanArrays> plans;  // [depth]
  std::int32_t* ids = nullptr;          // current
  float* weights = nullptr;
  std::uint16_t* x = nullptr;
  std::uint16_t* out = nullptr;
  std::int32_t* block_counts = nullptr;
  std::uint64_t* bad_choice = nullptr;
  struct Set {
    std::int32_t *ids, *dest, *slot;
    float* weights;
    std::uint16_t* x;
    Origin* origins;
    int num_origins;
    layout::TokenEntry* entries;
    int num_token_rows;
  };
  std::vector<Set> sets;
};

template <typename T>
T* Cluster::device(std::size_t count, int fill) {
  void* pointer = nullptr;
  const std::size_t bytes = std::max<std::size_t>(count * sizeof(T), 16);
  CUDA_OK(cudaMalloc(&pointer, bytes));
  CUDA_OK(cudaMemset(pointer, fill, bytes));
  allocations_.push_back(pointer);
  return static_cast<T*>(pointer);
}
template <typename T>
T* Cluster::upload(const std::vector<T>& values) {
  T* pointer = device<T>(values.size());
  CUDA_OK(cudaMemcpy(pointer, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  return pointer;
}

Cluster::Cluster(const Options& options) : shape_(options.shape), first_(options.first_rank) {
  CUDA_OK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  CUDA_OK(cuda::prepare_count());
  CUDA_OK(cuda::prepare_dispatch_send());
  for (int set = 0; set < shape_.sets; ++set) plans_.push_back(make_plans(shape_, set));
  const int local_ranks = options.local_ranks > 0 ? options.local_ranks : shape_.ranks;
  launch_ranks = local_ranks;
  const bool bulk = shape_.bulk && cuda::bulk_legal(shape_.row_bytes(), shape_.x_bytes(), nullptr);
  const double everywhere = shape_.ranks * (1.0 - std::pow(1.0 - 1.0 / shape_.ranks, shape_.topk));
  dispatch_shape = cuda::choose_dispatch_shape(
      {shape_.tokens, shape_.row_bytes(),
       shape_.layout == Layout::tokens || shape_.fill ? everywhere : shape_.topk, shape_.blocks,
       bulk});
  combine_shape = cuda::choose_combine_shape(
      {shape_.tokens, shape_.x_bytes(), everywhere, shape_.blocks, sum_of(shape_)});

  std::vector<std::int32_t> identity(static_cast<std::size_t>(shape_.experts) + 1);
  std::vector<std::int32_t> slot_rank, slot_begin;
  for (int e = 0; e <= shape_.experts; ++e) identity[static_cast<std::size_t>(e)] = e;
  for (int e = 0; e < shape_.experts; ++e) slot_rank.push_back(rank_of_slot(shape_, e));
  for (int r = 0; r <= shape_.ranks; ++r) slot_begin.push_back(first_slot_of(shape_, r));
  placement_ = {upload(identity),   upload(identity), upload(slot_rank),
                upload(slot_begin), shape_.experts,   shape_.experts};
  mismatches_ = device<Mismatches>(1);
  CUDA_OK(cudaHostAlloc(&fault_records_,
                        sizeof(std::uint64_t) * static_cast<std::size_t>(local_ranks),
                        cudaHostAllocMapped));
  std::memset(fault_records_, 0, sizeof(std::uint64_t) * static_cast<std::size_t>(local_ranks));

  locals_.resize(static_cast<std::size_t>(local_ranks));
  make_windows(options);
  for (int i = 0; i < local_ranks; ++i) {
    make_local(locals_[static_cast<std::size_t>(i)], first_ + i, options.deadline_s);
    locals_[static_cast<std::size_t>(i)].context.fault_record = fault_records_ + i;
  }
  CUDA_OK(cudaDeviceSynchronize());
}

void Cluster::make_windows(const Options& options) {
  std::size_t rows = 1, token_rows = 1;
  for (const auto& plans : plans_) {
    for (const RankPlan& plan : plans) {
      rows = std::max(rows, plan.rows.size());
      token_rows = std::max(token_rows, plan.token_rows.size());
    }
  }
  const bool tokens = shape_.layout == Layout::tokens;
  const bool entries = shape_.layout != Layout::slots;
  layout::WindowParams params;
  params.ranks = static_cast<std::uint64_t>(shape_.ranks);
  params.num_slots = static_cast<std::uint64_t>(shape_.experts);
  params.topk = static_cast<std::uint64_t>(shape_.topk);
  params.depth = static_cast<std::uint64_t>(shape_.depth);
  params.row_bytes = shape_.row_bytes();
  params.result_bytes = shape_.x_bytes();
  params.row_capacity = tokens ? token_rows : rows;
  params.token_row_capacity = entries ? token_rows : 0;
  params.result_capacity = params.row_capacity;
  params.partial_capacity =
      shape_.layout == Layout::grouped && shape_.reduction == Reduction::by_rank && shape_.partials
          ? token_rows
          : 0;
  layout_ = layout::make_window_layout(params);

  windows_.assign(static_cast<std::size_t>(shape_.ranks), nullptr);
  opened_.assign(static_cast<std::size_t>(shape_.ranks), false);
  for (std::size_t i = 0; i < locals_.size(); ++i) {
    windows_[static_cast<std::size_t>(first_) + i] =
        device<std::byte>(layout::round_up(layout_.bytes, 2 << 20));
  }
  CUDA_OK(cudaDeviceSynchronize());
  if (options.gather) {
    cudaIpcMemHandle_t mine;
    CUDA_OK(cudaIpcGetMemHandle(&mine, windows_[static_cast<std::size_t>(first_)]));
    const std::vector<cudaIpcMemHandle_t> handles = options.gather(mine);
    for (std::size_t peer = 0; peer < windows_.size(); ++peer) {
      if (windows_[peer] != nullptr) continue;
      void* opened = nullptr;
      CUDA_OK(cudaIpcOpenMemHandle(&opened, handles[peer], cudaIpcMemLazyEnablePeerAccess));
      windows_[peer] = static_cast<std::byte*>(opened);
      opened_[peer] = true;
    }
  }
  device_windows_ = upload(windows_);
}

void Cluster::make_local(Local& local, int rank, double deadline_s) {
  const auto tokens = static_cast<std::size_t>(shape_.tokens);
  const auto choices = tokens * static_cast<std::size_t>(shape_.topk);
  const auto elements = tokens * static_cast<std::size_t>(shape_.hidden);
  const auto slots = static_cast<std::size_t>(max_local_slots(shape_));
  const auto ranks = static_cast<std::size_t>(shape_.ranks);
  local.rank = rank;
  local.context = {layout_,
                   device_windows_,
                   device<cuda::RankState>(1),
                   nullptr,
                   static_cast<std::uint64_t>(deadline_s * 1e9),
                   rank,
                   shape_.ranks,
                   shape_.topk};
  for (int g = 0; g < shape_.depth; ++g) {
    local.plans.push_back({device<std::int32_t>(choices), device<std::int32_t>(choices),
                           device<std::int32_t>(choices), device<std::int32_t>(choices),
                           device<float>(choices), device<std::uint8_t>(choices),
                           device<std::int32_t>(slots), device<std::int32_t>(slots + 1),
                           device<std::int32_t>(ranks), device<std::int32_t>(ranks),
                           device<std::int32_t>(cuda::kNumPlanTotals), shape_.tokens_of(rank)});
  }
  local.ids = device<std::int32_t>(choices);
  local.weights = device<float>(choices);
  local.x = device<std::uint16_t>(elements);
  local.out = device<std::uint16_t>(elements);
  local.block_counts = device<std::int32_t>(
      cuda::count_workspace_entries(shape_.blocks, shape_.experts, shape_.ranks));
  local.bad_choice = device<std::uint64_t>(1, 0xFF);
  for (int set = 0; set < shape_.sets; ++set) {
    const RankPlan& plan = plans_[static_cast<std::size_t>(set)][static_cast<std::size_t>(rank)];
    const auto& origins = shape_.layout == Layout::tokens ? plan.token_rows : plan.rows;
    Local::Set s{upload(plan.ids),
                 upload(plan.dest),
                 upload(plan.slot),
                 upload(plan.weights),
                 device<std::uint16_t>(elements),
                 upload(origins),
                 static_cast<int>(origins.size()),
                 upload(plan.entries),
                 static_cast<int>(plan.token_rows.size())};
    fill_payload<<<256, kThreads, 0, stream_>>>(s.x, shape_.tokens, shape_.hidden, set, rank);
    CUDA_OK(cudaGetLastError());
    local.sets.push_back(s);
  }
}

Cluster::~Cluster() {
  cudaStreamSynchronize(stream_);
  for (std::size_t peer = 0; peer < windows_.size(); ++peer) {
    if (opened_[peer]) cudaIpcCloseMemHandle(windows_[peer]);
  }
  for (void* pointer : allocations_) cudaFree(pointer);
  cudaFreeHost(fault_records_);
  cudaStreamDestroy(stream_);
}

// --- The calls of a step --------------------------------------------------------------------------

void Cluster::load_set(int set) {
  for (Local& local : locals_) {
    const Local::Set& s = local.sets[static_cast<std::size_t>(set)];
    const auto tokens = static_cast<std::size_t>(shape_.tokens_of(local.rank));
    const std::size_t choices = tokens * static_cast<std::size_t>(shape_.topk);
    const auto copy = [&](void* to, const void* from, std::size_t bytes) {
      CUDA_OK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream_));
    };
    copy(local.ids, s.ids, choices * sizeof(std::int32_t));
    copy(local.weights, s.weights, choices * sizeof(float));
    copy(local.x, s.x, tokens * shape_.x_bytes());
  }
}

void Cluster::plan(int generation, cuda::CountStep step) {
  cuda::RankTable<cuda::CountArgs> table{};
  for (std::size_t i = 0; i < locals_.size(); ++i) {
    Local& local = locals_[i];
    table.rank[i] = {
        local.context,
        local.plans[static_cast<std::size_t>(generation)],
        placement_,
        local.ids,
        local.weights,
        false,
        local.block_counts,
        local.bad_choice,
        cuda::choose_chunk_tokens(shape_.tokens, shape_.blocks),
        shape_.alignment,
        rows_per_slot(shape_),
        shape_.layout == Layout::grouped ? static_cast<std::int32_t>(layout_.row_capacity) : 0};
  }
  CUDA_OK(cuda::launch_count(table, launch_ranks, shape_.blocks, step, stream_));
}

namespace {
cuda::Rows rows_of(const Shape& shape) {
  if (shape.layout == Layout::tokens) return cuda::Rows::per_rank;
  return shape.fill ? cuda::Rows::first_slot : cuda::Rows::per_slot;
}
bool needs_recv(const Shape& shape) {
  return shape.fill || (shape.layout == Layout::grouped && shape.alignment > 1);
}
}  // namespace

void Cluster::dispatch_send(int generation, bool receive) {
  cuda::RankTable<cuda::DispatchSendArgs> table{};
  for (std::size_t i = 0; i < locals_.size(); ++i) {
    Local& local = locals_[i];
    table.rank[i] = {local.context,
                     local.plans[static_cast<std::size_t>(generation)],
                     reinterpret_cast<const std::byte*>(local.x),
                     shape_.x_bytes(),
                     static_cast<std::uint32_t>(generation),
                     rows_of(shape_),
                     shape_.layout != Layout::slots,
                     receive};
  }
  if (shape_.e4m3) {
    CUDA_OK(cuda::launch_dispatch_send_e4m3(table, launch_ranks, shape_.blocks, shape_.hidden,
                                            stream_));
  } else {
    CUDA_OK(cuda::launch_dispatch_send(table, launch_ranks, dispatch_shape, stream_));
  }
}

void Cluster::dispatch_recv(int generation) {
  cuda::RankTable<cuda::DispatchRecvArgs> table{};
  for (std::size_t i = 0; i < locals_.size(); ++i) {
    Local& local = locals_[i];
    const int local_slots =
        first_slot_of(shape_, local.rank + 1) - first_slot_of(shape_, local.rank);
    table.rank[i] = {local.context, local.plans[static_cast<std::size_t>(generation)],
                     static_cast<std::uint32_t>(generation), rows_of(shape_),
                     shape_.layout == Layout::grouped ? local_slots : 0};
  }
  const int blocks = needs_recv(shape_) ? shape_.blocks : 1;
  CUDA_OK(cuda::launch_dispatch_recv(table, launch_ranks, blocks, stream_));
}

void Cluster::dispatch(int generation) {
  const bool separate = needs_recv(shape_);
  dispatch_send(generation, !separate);
  if (separate) dispatch_recv(generation);
}

void Cluster::combine_send(int generation) {
  cuda::RankTable<cuda::CombineSendArgs> table{};
  for (std::size_t i = 0; i < locals_.size(); ++i) {
    Local& local = locals_[i];
    table.rank[i] = {local.context, local.plans[static_cast<std::size_t>(generation)],
                     static_cast<std::uint32_t>(generation), sums_partials(shape_)};
  }
  const int blocks = sums_partials(shape_) ? shape_.blocks : 1;
  CUDA_OK(cuda::launch_combine_send(table, launch_ranks, blocks, stream_));
}

void Cluster::combine_recv(int generation, bool send) {
  cuda::RankTable<cuda::CombineRecvArgs> table{};
  for (std::size_t i = 0; i < locals_.size(); ++i) {
    Local& local = locals_[i];
    table.rank[i] = {local.context,
                     local.plans[static_cast<std::size_t>(generation)],
                     reinterpret_cast<std::byte*>(local.out),
                     shape_.x_bytes(),
                     static_cast<std::uint32_t>(generation),
                     sum_of(shape_),
                     send};
  }
  CUDA_OK(cuda::launch_combine_recv(table, launch_ranks, combine_shape, stream_));
}

void Cluster::combine(int generation) {
  const bool separate = sums_partials(shape_);
  if (separate) combine_send(generation);
  combine_recv(generation, !separate);
}

void Cluster::delay(int step, int most_us) {
  const std::uint32_t draw = mix(static_cast<std::uint32_t>(step * 64 + first_));
  if (draw % 3 == 0) return;
  sleep_for<<<1, 1, 0, stream_>>>((draw >> 8) % static_cast<unsigned>(most_us * 1000));
  CUDA_OK(cudaGetLastError());
}

// --- Checks ---------------------------------------------------------------------------------------

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
                     shape_.e4m3,
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
  const SumRule rule{shape_.layout, shape_.reduction, shape_.ranks,
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
    std::vector<std::uint16_t> out(static_cast<std::size_t>(shape_.tokens_of(local.rank)) *
                                   static_cast<std::size_t>(shape_.hidden));
    CUDA_OK(cudaMemcpy(out.data(), local.out, out.size() * 2, cudaMemcpyDeviceToHost));
    for (const std::uint16_t element : out) {
      if (element == 0x7FC0) continue;
      std::printf("rank %d: %04x where the one NaN belongs\n", local.rank, element);
      return false;
    }
  }
  return true;
}

bool Cluster::sums_are_right_on_host(int set) {
  CUDA_OK(cudaStreamSynchronize(stream_));
  const SumRule rule{shape_.layout, shape_.reduction, shape_.ranks,
                     shape_.topk,   shape_.experts,   set};
  for (Local& local : locals_) {
    const RankPlan& p = plans_[static_cast<std::size_t>(set)][static_cast<std::size_t>(local.rank)];
    const int tokens = shape_.tokens_of(local.rank);
    std::vector<std::uint16_t> out(static_cast<std::size_t>(tokens) *
                                   static_cast<std::size_t>(shape_.hidden));
    CUDA_OK(cudaMemcpy(out.data(), local.out, out.size() * 2, cudaMemcpyDeviceToHost));
    for (std::size_t i = 0; i < out.size(); ++i) {
      const auto token = i / static_cast<std::size_t>(shape_.hidden);
      const auto column = static_cast<int>(i % static_cast<std::size_t>(shape_.hidden));
      const std::size_t first = token * static_cast<std::size_t>(shape_.topk);
      const std::uint16_t expected =
          expected_sum(rule, local.rank, static_cast<int>(token), column, p.dest.data() + first,
                       p.slot.data() + first, p.weights.data() + first);
      if (out[i] == expected) continue;
      std::printf("rank %d token %zu column %d: sum is %04x, expected %04x (host)\n", local.rank,
                  token, column, out[i], expected);
      return false;
    }
  }
  return true;
}

layout::Fault Cluster::fault(int local) const {
  return layout::unpack_fault(*static_cast<volatile std::uint64_t*>(fault_records_ + local));
}

void Cluster::poison_windows() {
  for (Local& local : locals_) {
    std::byte* window = windows_[static_cast<std::size_t>(local.rank)];
    CUDA_OK(cudaMemsetAsync(window + layout_.rows, 0xFF, layout_.bytes - layout_.rows, stream_));
    CUDA_OK(cudaMemsetAsync(local.out, 0xFF,
                            static_cast<std::size_t>(shape_.tokens) * shape_.x_bytes(), stream_));
  }
}

std::int64_t Cluster::tokens() const {
  std::int64_t total = 0;
  for (int rank = 0; rank < shape_.ranks; ++rank) total += shape_.tokens_of(rank);
  return total;
}

std::int64_t Cluster::rows_sent(int set) const {
  std::int64_t rows = 0;
  for (const RankPlan& plan : plans_[static_cast<std::size_t>(set)]) {
    if (shape_.layout == Layout::tokens) {
      rows += static_cast<std::int64_t>(plan.token_rows.size());
    } else {
      for (const std::int32_t count : plan.slot_counts) rows += count;
    }
  }
  return rows;
}

}  // namespace wherry::bench
