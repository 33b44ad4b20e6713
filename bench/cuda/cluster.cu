// The memory of a Cluster and the calls of a step.
#include "cluster_local.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace wherry::bench {

namespace cuda = kernels::cuda;

namespace {

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
  CUDA_OK(cuda::prepare_plan_dispatch());
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

  fused_shape = cuda::choose_plan_dispatch_shape({.tokens = shape_.tokens,
                                                  .num_sms = shape_.blocks,
                                                  .topk = shape_.topk,
                                                  .ranks = shape_.ranks,
                                                  .experts = shape_.experts,
                                                  .slots = shape_.experts,
                                                  .row_bytes = shape_.row_bytes(),
                                                  .scale_pitch = shape_.scale_pitch(),
                                                  .bulk = shape_.bulk});

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
  params.partial_bytes = shape_.x_bytes();
  params.row_capacity = tokens ? token_rows : rows;
  params.scale_plane_bytes = params.row_capacity * shape_.scale_pitch();
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
  const auto x_bytes = tokens * static_cast<std::size_t>(shape_.x_bytes());
  const auto slots = static_cast<std::size_t>(max_local_slots(shape_));
  const auto ranks = static_cast<std::size_t>(shape_.ranks);
  local.rank = rank;
  local.context = {layout_,
                   device_windows_,
                   windows_[static_cast<std::size_t>(rank)],
                   device<cuda::RankState>(1),
                   nullptr,
                   static_cast<std::uint64_t>(deadline_s * 1e9),
                   rank,
                   shape_.ranks,
                   shape_.topk};
  for (int g = 0; g < shape_.depth; ++g) {
    local.plans.push_back(
        {device<std::int32_t>(choices), device<std::int32_t>(choices),
         device<std::int32_t>(choices), device<std::int32_t>(choices), device<float>(choices),
         device<std::uint8_t>(choices), device<std::int32_t>(slots),
         device<std::int32_t>(slots + 1), device<std::int32_t>(ranks), device<std::int32_t>(ranks),
         device<std::int32_t>(cuda::kNumPlanTotals), nullptr, shape_.tokens_of(rank)});
  }
  local.ids = device<std::int32_t>(choices);
  local.weights = device<float>(choices);
  local.x = device<std::byte>(x_bytes);
  local.out = device<std::byte>(x_bytes);
  local.count_workspace =
      device<std::byte>(cuda::count_workspace_bytes(shape_.blocks, shape_.experts, shape_.ranks));
  for (int set = 0; set < shape_.sets; ++set) {
    const RankPlan& plan = plans_[static_cast<std::size_t>(set)][static_cast<std::size_t>(rank)];
    const auto& origins = shape_.layout == Layout::tokens ? plan.token_rows : plan.rows;
    Local::Set s{upload(plan.ids),
                 upload(plan.dest),
                 upload(plan.slot),
                 upload(plan.weights),
                 device<std::byte>(x_bytes),
                 upload(origins),
                 static_cast<int>(origins.size()),
                 upload(plan.entries),
                 static_cast<int>(plan.token_rows.size())};
    fill_payload(s.x, shape_.dtype, shape_.tokens, shape_.hidden, set, rank, stream_);
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

namespace {
cuda::Rows rows_of(const Shape& shape) {
  if (shape.layout == Layout::tokens) return cuda::Rows::per_rank;
  return shape.fill ? cuda::Rows::first_slot : cuda::Rows::per_slot;
}
bool needs_recv(const Shape& shape) {
  return shape.fill || (shape.layout == Layout::grouped && shape.alignment > 1);
}
}  // namespace

cuda::CountArgs Cluster::count_args(const Local& local, int generation, int chunk_tokens) const {
  return {.context = local.context,
          .plan = local.plans[static_cast<std::size_t>(generation)],
          .placement = placement_,
          .ids = local.ids,
          .weights = local.weights,
          .workspace = local.count_workspace,
          .loads = nullptr,
          .report = nullptr,
          .wrong = 0,
          .placement_hash = 0,
          .call_status = 0,
          .ids_are_int64 = false,
          .chunk_tokens = chunk_tokens,
          .workspace_blocks = shape_.blocks,
          .alignment = shape_.alignment,
          .rows_per_slot = rows_per_slot(shape_),
          .row_limit = shape_.layout == Layout::grouped
                           ? static_cast<std::int32_t>(layout_.row_capacity)
                           : 0};
}

cuda::Outgoing Cluster::outgoing(const Local& local, int generation, bool receive) const {
  return {.x = local.x,
          .x_pitch = shape_.x_bytes(),
          .scale_pitch = shape_.scale_pitch(),
          .generation = static_cast<std::uint32_t>(generation),
          .rows = rows_of(shape_),
          .entries = shape_.layout != Layout::slots,
          .unweighted = false,
          .receive = receive};
}

void Cluster::plan(int generation, cuda::CountStep step) {
  cuda::RankTable<cuda::CountArgs> table{};
  const int chunk = cuda::choose_chunk_tokens(shape_.tokens, shape_.blocks, shape_.topk);
  for (std::size_t i = 0; i < locals_.size(); ++i) {
    table.rank[i] = count_args(locals_[i], generation, chunk);
  }
  CUDA_OK(cuda::launch_count(table, launch_ranks, step, stream_));
}

void Cluster::plan_dispatch(int generation) {
  const bool separate = needs_recv(shape_);
  if (fused_shape.chunk_tokens == 0) {
    plan(generation);
    dispatch(generation);
    return;
  }
  cuda::RankTable<cuda::PlanDispatchArgs> table{};
  for (std::size_t i = 0; i < locals_.size(); ++i) {
    table.rank[i] = {count_args(locals_[i], generation, fused_shape.chunk_tokens),
                     outgoing(locals_[i], generation, !separate)};
  }
  CUDA_OK(cuda::launch_plan_dispatch(table, launch_ranks, fused_shape, stream_));
  if (separate) dispatch_recv(generation);
}

void Cluster::dispatch_send(int generation, bool receive) {
  cuda::RankTable<cuda::DispatchSendArgs> table{};
  for (std::size_t i = 0; i < locals_.size(); ++i) {
    const Local& local = locals_[i];
    table.rank[i] = {local.context, local.plans[static_cast<std::size_t>(generation)],
                     outgoing(local, generation, receive)};
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
    table.rank[i] = {local.context,
                     local.plans[static_cast<std::size_t>(generation)],
                     static_cast<std::uint32_t>(generation),
                     rows_of(shape_),
                     shape_.layout == Layout::grouped ? local_slots : 0,
                     0,
                     nullptr,
                     nullptr};
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
                     static_cast<std::uint32_t>(generation), shape_.dtype, sums_partials(shape_)};
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
                     local.out,
                     shape_.x_bytes(),
                     static_cast<std::uint32_t>(generation),
                     shape_.dtype,
                     sum_of(shape_),
                     send,
                     false};
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
