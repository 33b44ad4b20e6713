// Construction on a GPU, and what is common to dispatch and combine.
#include "exchange/cuda/exchange.hpp"

#include <algorithm>
#include <cmath>
#include <span>
#include <utility>

#include "kernels/cuda/launch.hpp"
#include "kernels/wires.hpp"
#include "support/check.hpp"

namespace wherry::cuda {

namespace kernel = kernels::cuda;

namespace {

constexpr int kDefaultSms = 16;

bool same_gpu(const CudaPlace& a, const CudaPlace& b) { return a.gpu == b.gpu; }
bool launch_together(const CudaPlace& a, const CudaPlace& b) {
  return a.process == b.process && same_gpu(a, b);
}

// What of a configuration the GPU kernels cannot do; empty: nothing.
std::string unsupported(const ExchangeConfig& config, const Placement& placement) {
  if (config.topk > kernel::kMaxTopk) {
    return fmt::format("topk is {}; on CUDA it may be 1..{}", config.topk, kernel::kMaxTopk);
  }
  if (config.replicated != 1) {
    return fmt::format("replicated is {}; on CUDA it must be 1", config.replicated);
  }
  if (config.expert_ids == ExpertIds::physical &&
      std::ranges::find(placement.slot_to_expert(), -1) != placement.slot_to_expert().end()) {
    return "expert_ids are physical and a slot holds no expert, which CUDA does not check";
  }
  if (config.max_tokens * placement.num_ranks() >= (1 << 24)) {
    return fmt::format("max_tokens is {}; on CUDA all {} ranks together may bring {} tokens",
                       config.max_tokens, placement.num_ranks(), (1 << 24) - 1);
  }
  if (!config.kernels.empty() && config.kernels != "cuda" && config.kernels != "cuda_link" &&
      config.kernels != "cuda_copy") {
    return fmt::format("kernels is '{}'; on CUDA there are cuda, cuda_link and cuda_copy",
                       config.kernels);
  }
  return {};
}

}  // namespace

std::vector<std::unique_ptr<DeviceExchange>> make_exchanges(const Group& group, Device device,
                                                            std::span<const ExchangeConfig> configs,
                                                            std::span<std::byte> window) {
  for (const ExchangeConfig& config : configs) agree(group, device, config);
  const std::vector<CudaPlace> places = find_places(group, device);
  std::vector<std::unique_ptr<CudaExchange>> exchanges;
  std::vector<layout::WindowParams> params;
  for (const ExchangeConfig& config : configs) {
    exchanges.push_back(std::make_unique<CudaExchange>(group, device, places, config));
    params.push_back(exchanges.back()->window_params());
  }
  const SharedLayout shared = share_window(params);
  const auto windows = std::make_shared<MappedWindows>();
  windows->fabric = std::make_unique<CudaPeerFabric>(
      group, places,
      WindowRequest{shared.bytes, configs.front().populate, configs.front().deadline, window});
  windows->shared = configs.size() > 1;
  std::vector<std::unique_ptr<DeviceExchange>> made;
  for (std::size_t i = 0; i < exchanges.size(); ++i) {
    exchanges[i]->attach(group, windows, shared.places[i]);
    made.push_back(std::move(exchanges[i]));
  }
  return made;
}

// Which rows travel, and where the windows' regions lie, follows from these; not all of it is in what agree()
// compares.
void CudaExchange::agree_on_path(const Group& group, const ExchangeConfig& config) const {
  const std::string mine = fmt::format("{}, sum_at {}", over_link_ ? "those of a link" : "cuda",
                                       name(config.effective_sum_at()));
  const auto all = group.allgather(std::as_bytes(std::span(mine)));
  const auto text = [&all](std::size_t peer) {
    return std::string_view(reinterpret_cast<const char*>(all[peer].data()), all[peer].size());
  };
  for (std::size_t peer = 1; peer < all.size(); ++peer) {
    WHERRY_CHECK(text(peer) == text(0), ErrorCode::config_mismatch,
                 (Error::Where{Stage::startup, group.rank(), static_cast<int>(peer)}),
                 "kernels are {} on rank 0 and {} on rank {}", text(0), text(peer), peer);
  }
}

CudaExchange::CudaExchange(const Group& group, Device device, const std::vector<CudaPlace>& places,
                           const ExchangeConfig& config_in)
    : device_(device) {
  const auto mine = static_cast<std::size_t>(group.rank());
  ExchangeConfig config = config_in;
  int sharing = 0;
  for (std::size_t peer = 0; peer < places.size(); ++peer) {
    one_gpu_ = one_gpu_ && same_gpu(places[peer], places.front());
    if (same_gpu(places[peer], places[mine])) ++sharing;
    if (!launch_together(places[peer], places[mine])) continue;
    if (peer == mine) local_ = static_cast<int>(together_.size());
    together_.push_back(static_cast<int>(peer));
  }
  over_link_ = !one_gpu_ || config.kernels == "cuda_link";
  // Over a link the fewest bytes are one row per (token, rank).
  if (!config.sum_at.has_value() && over_link_ &&
      config.effective_reduction() == Reduction::by_rank) {
    config.sum_at = SumAt::expert;
  }
  agree_on_path(group, config);
  const Placement first = placement_of(config, group.size());
  mode_ = mode_of(config);
  const DeviceGuard guard(device.ordinal);
  int sms = 0;
  cuda::check(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device.ordinal),
              {Stage::startup, group.rank(), -1}, "cudaDeviceGetAttribute");
  cuda::check(kernel::shared_bytes_of_block(shared_bytes_), {Stage::startup, group.rank(), -1},
              "cudaDeviceGetAttribute");
  int cache_bytes = 0;
  cuda::check(cudaDeviceGetAttribute(&cache_bytes, cudaDevAttrL2CacheSize, device.ordinal),
              {Stage::startup, group.rank(), -1}, "cudaDeviceGetAttribute");
  cache_bytes_ = static_cast<std::uint64_t>(cache_bytes / sharing);
  num_sms_ =
      config.num_sms != 0 ? config.num_sms : std::max(1, std::min(kDefaultSms, sms / sharing));
  std::string problem = unsupported(config, first);
  if (problem.empty() && (num_sms_ < 1 || num_sms_ * sharing > sms)) {
    problem = fmt::format(
        "num_sms is {}; {} ranks share a GPU with {} multiprocessors, and all their "
        "blocks must run at once",
        num_sms_, sharing, sms);
  }
  if (problem.empty() && static_cast<int>(together_.size()) > kernel::kMaxRanksPerLaunch) {
    problem = fmt::format("{} ranks are threads of one process on one GPU; at most {} may be",
                          together_.size(), kernel::kMaxRanksPerLaunch);
  }
  if (problem.empty() &&
      !kernel::plan_fits(config.experts, first.num_slots(), group.size(), shared_bytes_)) {
    problem = fmt::format(
        "{} experts in {} slots on {} ranks are more than a block can count in {} "
        "bytes of shared memory",
        config.experts, first.num_slots(), group.size(), shared_bytes_);
  }
  const auto problems = group.allgather(std::as_bytes(std::span(problem)));
  for (std::size_t peer = 0; peer < problems.size(); ++peer) {
    if (problems[peer].empty()) continue;
    throw Error(ErrorCode::unsupported, {Stage::startup, group.rank(), static_cast<int>(peer)},
                {reinterpret_cast<const char*>(problems[peer].data()), problems[peer].size()});
  }

  bool has_bulk = false;
  const Error::Where where{Stage::startup, group.rank(), -1};
  cuda::check(kernel::has_bulk_copies(device.ordinal, has_bulk), where, "cudaDeviceGetAttribute");
  bulk_ = has_bulk && config.kernels != "cuda_copy";
  overlaps_ = bulk_ && sharing == 1;
  for (const cudaError_t prepared :
       {kernel::prepare_count(), kernel::prepare_dispatch_send(),
        kernel::prepare_dispatch_send_e4m3(), kernel::prepare_plan_dispatch(),
        kernel::prepare_combine_recv(), kernel::prepare_combine_partials()}) {
    cuda::check(prepared, where, "load kernels");
  }
  config.num_sms = num_sms_;
  owner_ = std::make_shared<PlanOwner>(config, first, group.rank(), device.ordinal);
  placement_ = first;
  placement_hash_ = hash_of(first) >> (64 - kernel::kPlacementBits);
  const double ranks = group.size();
  everywhere_ = ranks * (1.0 - std::pow(1.0 - 1.0 / ranks, config.topk));
  generations_.resize(static_cast<std::size_t>(config.depth));
}

void CudaExchange::attach(const Group& group, std::shared_ptr<MappedWindows> windows,
                          const SharedLayout::Place& place) {
  const DeviceGuard guard(device_.ordinal);
  windows_ = std::move(windows);
  context_.layout = layout::make_window_layout(window_params(), place.rows_begin);
  take_memory(place.begin);

  // The first of the ranks that launch together makes what they share.
  std::shared_ptr<Launches> made;
  if (local_ == 0) made = std::make_shared<Launches>(together_, config().deadline);
  struct Address {
    const std::shared_ptr<Launches>* launches;
  };
  const Address mine_to_share{&made};
  const auto all = group.allgather(std::as_bytes(std::span(&mine_to_share, 1)));
  Address leader{};
  std::memcpy(&leader, all[static_cast<std::size_t>(together_.front())].data(), sizeof(leader));
  launches_ = *leader.launches;
  group.barrier();  // all have copied it, and nobody signals before everybody has mapped
}

CudaExchange::~CudaExchange() {
  // Kernels of this rank may still read what goes away here. An error was reported when it came.
  try {
    const DeviceGuard guard(device_.ordinal);
    if (cudaDeviceSynchronize() != cudaSuccess) static_cast<void>(cudaGetLastError());
  } catch (const Error&) {
    return;
  }
  if (windows_ != nullptr && windows_->user == this) windows_->user = nullptr;
}

void CudaExchange::take_memory(std::uint64_t begin) {
  const ExchangeConfig& c = config();
  const auto ranks = static_cast<std::size_t>(size());
  const auto slots = static_cast<std::size_t>(placement_.num_slots());
  // With physical ids each slot stands for an expert of its own.
  const bool physical = c.expert_ids == ExpertIds::physical;
  const std::size_t experts = physical ? slots : static_cast<std::size_t>(c.experts);
  const bool lists = mode_.sends_token_rows();
  const auto choices = lists ? static_cast<std::size_t>(context_.layout.token_row_capacity) *
                                   static_cast<std::size_t>(c.topk)
                             : 0;
  const auto gathered = lists ? static_cast<std::size_t>(context_.layout.scalar_capacity) : 0;
  std::byte* next = nullptr;
  std::byte** windows = nullptr;
  // Two passes over one list: how much, then where.
  const auto take = [&next]<typename T>(T*& array, std::size_t count, bool place) {
    if (place) array = reinterpret_cast<T*>(next);
    next += layout::round_up(count * sizeof(T), layout::kSignalStride);
  };
  const auto lay_out = [&](std::byte* memory) {
    const bool place = memory != nullptr;
    next = memory;
    take(context_.state, 1, place);
    take(windows, ranks, place);
    take(placement_memory_, experts + 1 + 2 * slots + ranks + 1, place);
    take(device_loads_, slots, place);
    take(workspace_, kernel::count_workspace_bytes(num_sms_, static_cast<int>(slots), size()),
         place);
    for (Generation& g : generations_) {
      take(g.choices, choices, place && lists);
      take(g.gather, gathered, place && lists);
    }
    return static_cast<std::size_t>(next - memory);
  };
  memory_ = DeviceMemory(device_.ordinal, lay_out(nullptr));
  lay_out(memory_.get());

  std::vector<std::byte*> bases(ranks);
  for (std::size_t peer = 0; peer < ranks; ++peer)
    bases[peer] = windows_->fabric->window(static_cast<int>(peer)) + begin;
  owner_->side.write(static_cast<void*>(windows), static_cast<const void*>(bases.data()),
                     ranks * sizeof(std::byte*));
  context_.windows = windows;
  context_.own = bases[static_cast<std::size_t>(rank())];
  context_.fault_record = owner_->fault_record();
  context_.deadline_ns = static_cast<std::uint64_t>(c.deadline.count() * 1e9);
  context_.rank = rank();
  context_.ranks = size();
  context_.topk = c.topk;

  placement_arrays_.experts = static_cast<std::int32_t>(experts);
  placement_arrays_.slots = static_cast<std::int32_t>(slots);
  placement_arrays_.expert_begin = placement_memory_;
  placement_arrays_.expert_slots = placement_memory_ + experts + 1;
  placement_arrays_.slot_rank = placement_memory_ + experts + 1 + slots;
  placement_arrays_.slot_begin = placement_memory_ + experts + 1 + 2 * slots;
  write_placement();
  earlier_loads_.assign(static_cast<std::size_t>(c.experts), 0);
}

void CudaExchange::write_placement() {
  const auto experts = static_cast<std::size_t>(placement_arrays_.experts);
  const auto slots = static_cast<std::size_t>(placement_arrays_.slots);
  std::vector<std::int32_t> words;
  words.reserve(experts + 2 + 2 * slots + static_cast<std::size_t>(size()));
  if (config().expert_ids == ExpertIds::physical) {
    for (std::size_t slot = 0; slot <= slots; ++slot)
      words.push_back(static_cast<std::int32_t>(slot));
    for (std::size_t slot = 0; slot < slots; ++slot)
      words.push_back(static_cast<std::int32_t>(slot));
  } else {
    // The slots of each expert in the order in which Placement::slot_for counts them.
    std::vector<std::int32_t> grouped;
    words.push_back(0);
    for (std::size_t expert = 0; expert < experts; ++expert) {
      const auto of_expert = placement_.slots_of(static_cast<int>(expert));
      grouped.insert(grouped.end(), of_expert.begin(), of_expert.end());
      words.push_back(static_cast<std::int32_t>(grouped.size()));
    }
    grouped.resize(slots, -1);  // slots without an expert: nobody looks
    words.insert(words.end(), grouped.begin(), grouped.end());
  }
  for (const int rank : placement_.slot_to_rank()) words.push_back(rank);
  for (const int begin : placement_.slot_begin()) words.push_back(begin);
  owner_->side.write(placement_memory_, words.data(), words.size() * sizeof(std::int32_t));
}

std::shared_ptr<DevicePlan> CudaExchange::make_plan() { return std::make_shared<CudaPlan>(owner_); }

void CudaExchange::throw_if_failed() const {
  const std::uint64_t word =
      std::atomic_ref(*owner_->fault_record()).load(std::memory_order_acquire);
  if (word == 0) return;
  const layout::Fault fault = layout::unpack_fault(word);
  Error error = error_of_fault(word, rank());
  // A rank that is gone cannot be late.
  if (error.code() == ErrorCode::timeout && static_cast<int>(fault.blamed) != rank() &&
      !windows_->fabric->alive(static_cast<int>(fault.blamed))) {
    throw Error(ErrorCode::peer_failed, {error.stage(), rank(), error.peer()},
                fmt::format("step {} (low 16 bits): rank {} has ended; reported by rank {}",
                            fault.step, fault.blamed, fault.reporter));
  }
  throw error;
}

void CudaExchange::check() {
  throw_if_failed();
  if (!owner_->has_report()) return;
  const kernel::PlanReport report = *owner_->report();
  std::atomic_ref(owner_->report()->serial).store(0, std::memory_order_release);
  throw error_of(report, *owner_);
}

CudaPlan& CudaExchange::own_plan(DevicePlan& plan, Stage stage) const {
  auto* const mine = dynamic_cast<CudaPlan*>(&plan);
  WHERRY_CHECK(
      mine != nullptr && mine->owner() == owner_.get(), ErrorCode::misuse, at(stage),
      "the plan was made by another exchange (or by none); use this exchange's make_plan()");
  return *mine;
}

CudaPlan& CudaExchange::filled_plan(DevicePlan& plan, Stage stage) const {
  CudaPlan& mine = own_plan(plan, stage);
  WHERRY_CHECK(mine.serial() != 0, ErrorCode::misuse, at(stage),
               "the plan has not been filled by plan()");
  return mine;
}

void CudaExchange::check_device_memory(Stage stage, const char* argument,
                                       const void* pointer) const {
  if (pointer == nullptr) return;
  cudaPointerAttributes attributes{};
  cuda::check(cudaPointerGetAttributes(&attributes, pointer), at(stage),
              "cudaPointerGetAttributes");
  WHERRY_CHECK(
      attributes.type != cudaMemoryTypeUnregistered, ErrorCode::bad_argument, at(stage),
      "{} is memory of the host; an exchange on cuda:{} takes memory that the GPU can reach",
      argument, device_.ordinal);
}

void CudaExchange::refuse(Stage stage, std::uint64_t step, const std::string& problem) {
  kernel::RankTable<kernel::TellArgs> table{};
  table.rank[0].context = context_;
  table.rank[0].fault = {static_cast<std::uint32_t>(ErrorCode::bad_argument) + 1,
                         static_cast<std::uint32_t>(stage), static_cast<std::uint32_t>(rank()),
                         static_cast<std::uint32_t>(rank()),
                         static_cast<std::uint32_t>(step & 0xFFFFU)};
  // It waits for nobody, so it need not be launched together.
  cuda::check(kernel::launch_tell(table, 1, stream_), at(stage), "launch");
  throw Error(ErrorCode::bad_argument, at(stage), problem);
}

TensorView CudaExchange::wanted(DType dtype, std::int64_t rows, std::int64_t cols) const noexcept {
  TensorView view;
  view.dtype = dtype;
  view.rows = rows;
  view.cols = cols;
  return view;
}

TensorView CudaExchange::on_wire(std::int64_t rows) const noexcept {
  const WireFormat& wire = mode_.dispatch_wire;
  return wire.quantised() ? wanted(DType::raw, rows, wire.payload_bytes)
                          : wanted(kernels::plain_dtype(wire.wire), rows, config().hidden);
}

void CudaExchange::check_tensor(Stage stage, std::uint64_t step, const char* argument,
                                const ConstTensorView& tensor, const TensorView& want) {
  if (tensor.rows != want.rows || tensor.cols != want.cols || tensor.dtype != want.dtype) {
    refuse(
        stage, step,
        fmt::format("{} is {} [{}, {}]; this call needs {} [{}, {}]", argument, name(tensor.dtype),
                    tensor.rows, tensor.cols, name(want.dtype), want.rows, want.cols));
  }
  if (tensor.rows > 0 && tensor.data == nullptr) {
    refuse(stage, step, fmt::format("{} is null", argument));
  }
  if (tensor.pitch() < tensor.row_bytes()) {
    refuse(stage, step,
           fmt::format("{} has a pitch of {} bytes; its rows have {}", argument, tensor.pitch(),
                       tensor.row_bytes()));
  }
  const auto element = static_cast<std::uint64_t>(dtype_bytes(tensor.dtype));
  if ((reinterpret_cast<std::uintptr_t>(tensor.data) | static_cast<std::uint64_t>(tensor.pitch())) %
          element !=
      0) {
    refuse(stage, step, fmt::format("{} is not aligned to its elements", argument));
  }
  check_device_memory(stage, argument, tensor.rows > 0 ? tensor.data : nullptr);
}

std::int64_t CudaExchange::room() const noexcept {
  return config().layout == Layout::slots
             ? placement_.num_local_slots(rank()) * owner_->capacity.rows_per_slot
             : static_cast<std::int64_t>(context_.layout.row_capacity);
}

std::span<const std::int64_t> CudaExchange::loads() {
  std::vector<std::int64_t> of_slots(static_cast<std::size_t>(placement_.num_slots()));
  owner_->side.read(of_slots.data(), device_loads_, of_slots.size() * sizeof(std::int64_t));
  loads_ = earlier_loads_;
  for (std::size_t slot = 0; slot < of_slots.size(); ++slot) {
    const int expert = placement_.slot_to_expert()[slot];
    if (expert >= 0) loads_[static_cast<std::size_t>(expert)] += of_slots[slot];
  }
  return loads_;
}

void CudaExchange::reset_loads() {
  std::ranges::fill(earlier_loads_, 0);
  owner_->side.write(device_loads_, nullptr,
                     static_cast<std::size_t>(placement_.num_slots()) * sizeof(std::int64_t));
}

void CudaExchange::set_placement(const Placement& placement) {
  const DeviceGuard guard(device_.ordinal);
  throw_if_failed();
  WHERRY_CHECK(!in_flight(), ErrorCode::misuse, at(Stage::placement),
               "a dispatch or combine is in flight; finish it first");
  check_switch(placement, placement_, rank());
  // Plans in the stream still read the placement before, and add to its loads.
  cuda::check(cudaStreamSynchronize(stream_), at(Stage::placement), "cudaStreamSynchronize");
  const auto before = loads();
  earlier_loads_.assign(before.begin(), before.end());
  owner_->side.write(device_loads_, nullptr,
                     static_cast<std::size_t>(placement_.num_slots()) * sizeof(std::int64_t));
  placement_ = placement;
  owner_->config.placement = placement;
  placement_hash_ = hash_of(placement) >> (64 - kernel::kPlacementBits);
  ++placements_;
  write_placement();
}

}  // namespace wherry::cuda
