// An exchange on a GPU begins: what the ranks must agree on, how it runs, and its memory.
#include "exchange/cuda/exchange.hpp"

#include <algorithm>
#include <cmath>
#include <span>
#include <utility>

#include "kernels/cuda/launch.hpp"
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
  if (!config.kernels.empty() && !kernels::is_on_cuda(config.kernels)) {
    return fmt::format("kernels is '{}'; on CUDA there are {}", config.kernels,
                       fmt::join(kernels::kOnCuda, ", "));
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
  if (config.kernels.empty()) config.kernels = kernels::from_environment_on_cuda();
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

}  // namespace wherry::cuda
