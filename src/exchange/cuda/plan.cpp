// Stage 2 on a GPU: the memory of a plan, and what the host makes of it.
#include "exchange/cuda/plan.hpp"

#include <atomic>
#include <utility>

#include "exchange/cuda/exchange.hpp"
#include "kernels/cuda/launch.hpp"
#include "plan/plan.hpp"
#include "support/check.hpp"

namespace wherry::cuda {

namespace kernel = kernels::cuda;

static_assert(kernel::kPlanBadExpert == static_cast<int>(PlanFault::bad_id));

PlanOwner::PlanOwner(const ExchangeConfig& config_in, const Placement& placement_in, int rank_in,
                     int ordinal_in)
    : config(config_in),
      placement(placement_in),
      capacity(capacity_of(config, placement)),
      rank(rank_in),
      ordinal(ordinal_in),
      side(ordinal),
      pinned(sizeof(std::uint64_t) + sizeof(kernel::PlanReport)) {}

std::uint64_t* PlanOwner::fault_record() const noexcept {
  return reinterpret_cast<std::uint64_t*>(pinned.get());
}
kernel::PlanReport* PlanOwner::report() const noexcept {
  return reinterpret_cast<kernel::PlanReport*>(pinned.get() + sizeof(std::uint64_t));
}
bool PlanOwner::has_report() const noexcept {
  return std::atomic_ref(report()->serial).load(std::memory_order_acquire) != 0;
}

Error error_of(const kernel::PlanReport& report, const PlanOwner& owner) {
  const Error::Where where{Stage::plan, owner.rank, report.peer};
  if (report.status == kernel::kPlanOtherPlacement) {
    return {ErrorCode::config_mismatch, where,
            fmt::format("rank {} has another placement than rank {}: call set_placement() on all "
                        "ranks, between the same two plans",
                        report.peer, owner.rank)};
  }
  if (report.status == kernel::kPlanOverflow) {
    return {ErrorCode::capacity, where,
            report.slot >= 0 ? fmt::format("slot {} would receive {} rows; rows_per_slot is {}",
                                           report.slot, report.rows, owner.capacity.rows_per_slot)
                             : fmt::format("rank {} would receive {} rows; receive_rows is {}",
                                           report.peer, report.rows, owner.capacity.limit)};
  }
  layout::CountHeader header{};
  header.status = report.status;
  header.token = report.token;
  header.choice = report.choice;
  header.id = report.id;
  const auto fault = static_cast<PlanFault>(report.status);
  if (fault == PlanFault::bad_topk) header.choice = static_cast<std::int32_t>(report.id);
  if (fault != PlanFault::bad_id) header.tokens = static_cast<std::int32_t>(report.id);
  return {code_of(fault), where, describe_fault(header, owner.config, owner.placement)};
}

CudaPlan::CudaPlan(std::shared_ptr<PlanOwner> owner) : owner_(std::move(owner)) {
  const DeviceGuard guard(owner_->ordinal);
  const auto choices = static_cast<std::size_t>(owner_->config.max_tokens * owner_->config.topk);
  const auto slots = static_cast<std::size_t>(owner_->placement.num_local_slots(owner_->rank));
  const auto ranks = static_cast<std::size_t>(owner_->placement.num_ranks());
  // Two passes over one list: how much, then where.
  std::byte* at = nullptr;
  const auto take = [&at]<typename T>(T*& array, std::size_t count) {
    if (at != nullptr) array = reinterpret_cast<T*>(at);
    const auto bytes = layout::round_up(count * sizeof(T), layout::kSignalStride);
    at += bytes;
    return bytes;
  };
  const auto lay_out = [&](std::byte* memory) {
    at = memory;
    return take(arrays_.dest, choices) + take(arrays_.slot, choices) + take(arrays_.row, choices) +
           take(arrays_.token_row, choices) + take(arrays_.weight, choices) +
           take(arrays_.repeat, choices) + take(arrays_.report, 1) +
           take(arrays_.slot_counts, slots) + take(arrays_.slot_begin, slots + 1) +
           take(arrays_.token_rows_from, ranks) + take(arrays_.token_rows_to, ranks) +
           take(arrays_.token_row_begin, ranks) + take(arrays_.totals, kernel::kNumPlanTotals);
  };
  memory_ = DeviceMemory(owner_->ordinal, lay_out(nullptr));
  lay_out(memory_.get());
  check(cudaEventCreateWithFlags(&filled_, cudaEventDisableTiming), {Stage::plan, owner_->rank, -1},
        "cudaEventCreate");
}

CudaPlan::~CudaPlan() { static_cast<void>(cudaEventDestroy(filled_)); }

void CudaPlan::filled(std::int64_t tokens, std::uint64_t serial, std::uint64_t placement) {
  arrays_.tokens = static_cast<std::int32_t>(tokens);
  serial_ = serial;
  placement_ = placement;
}

bool CudaPlan::ready() {
  const cudaError_t state = cudaEventQuery(filled_);
  if (state == cudaErrorNotReady) {
    static_cast<void>(cudaGetLastError());
    return false;
  }
  check(state, {Stage::plan, owner_->rank, -1}, "plan");
  return true;
}

const PlanData& CudaPlan::to_host() {
  const DeviceGuard guard(owner_->ordinal);
  check(cudaEventSynchronize(filled_), {Stage::plan, owner_->rank, -1}, "plan");
  // A wait that failed has left the plan as it was.
  const auto fault = std::atomic_ref(*owner_->fault_record()).load(std::memory_order_acquire);
  if (fault != 0) throw error_of_fault(fault, owner_->rank);
  kernel::PlanReport report{};
  owner_->side.read(&report, arrays_.report, sizeof(report));
  if (report.serial != 0) {
    // The exchange need not throw it again.
    const std::atomic_ref seen(owner_->report()->serial);
    if (seen.load(std::memory_order_acquire) == report.serial) seen.store(0);
    throw error_of(report, *owner_);
  }
  read();
  return data_;
}

void CudaPlan::read() {
  const auto topk = static_cast<std::size_t>(owner_->config.topk);
  const auto choices = static_cast<std::size_t>(arrays_.tokens) * topk;
  const auto slots = static_cast<std::size_t>(owner_->placement.num_local_slots(owner_->rank));
  const auto ranks = static_cast<std::size_t>(owner_->placement.num_ranks());
  const auto fetch = [this]<typename T>(std::vector<T>& to, const T* from, std::size_t count) {
    to.resize(count);
    owner_->side.read(to.data(), from, count * sizeof(T));
  };
  const auto fetch_wide = [&](std::vector<std::int64_t>& to, const std::int32_t* from,
                              std::size_t count) {
    std::vector<std::int32_t> narrow;
    fetch(narrow, from, count);
    to.assign(narrow.begin(), narrow.end());
  };
  data_.tokens = arrays_.tokens;
  data_.topk = owner_->config.topk;
  data_.send_begin = data_.home_begin = 0;
  data_.send_end = data_.home_end = data_.tokens;
  fetch(data_.dest, arrays_.dest, choices);
  fetch(data_.slot, arrays_.slot, choices);
  fetch(data_.row, arrays_.row, choices);
  fetch(data_.token_row, arrays_.token_row, choices);
  fetch(data_.weight, arrays_.weight, choices);
  fetch(data_.repeat, arrays_.repeat, choices);
  fetch_wide(data_.slot_counts, arrays_.slot_counts, slots);
  fetch_wide(data_.slot_begin, arrays_.slot_begin, slots + 1);
  fetch_wide(data_.token_rows_from, arrays_.token_rows_from, ranks);
  fetch_wide(data_.token_rows_to, arrays_.token_rows_to, ranks);
  std::vector<std::int32_t> totals;
  fetch(totals, arrays_.totals, kernel::kNumPlanTotals);
  data_.rows_received = totals[kernel::kRowsReceived];
  data_.token_rows_received = totals[kernel::kTokenRowsReceived];
  data_.rows_to.assign(ranks, 0);
  data_.dropped.assign(static_cast<std::size_t>(owner_->placement.num_slots()), 0);
  for (std::size_t at = 0; at < choices; ++at) {
    if (data_.dest[at] < 0) {
      data_.weight[at] = 0.0F;
      continue;
    }
    if (data_.repeat[at] != 0) continue;
    if (data_.row[at] >= 0) {
      ++data_.rows_to[static_cast<std::size_t>(data_.dest[at])];
    } else {
      ++data_.dropped[static_cast<std::size_t>(data_.slot[at])];
    }
  }
}

// --- Of the exchange ------------------------------------------------------------------------------

kernel::CountArgs CudaExchange::count_args(const Routing& routing, const CudaPlan& plan) const {
  kernel::CountArgs args{};
  args.context = context_;
  args.plan = plan.arrays();
  args.placement = placement_arrays_;
  args.ids = routing.ids;
  args.weights = routing.weights;
  args.workspace = workspace_;
  args.loads = device_loads_;
  args.report = owner_->report();
  args.placement_hash = placement_hash_;
  args.ids_are_int64 = routing.ids_are_int64;
  args.workspace_blocks = num_sms_;
  args.alignment = config().alignment;
  args.rows_per_slot = static_cast<std::int32_t>(owner_->capacity.rows_per_slot);
  args.drops = config().overflow == Overflow::drop;
  args.row_limit =
      config().layout == Layout::grouped ? static_cast<std::int32_t>(owner_->capacity.limit) : 0;
  // A routing of the wrong shape is told to all ranks like a bad id: they are on their way here.
  const auto refuse = [&args](PlanFault fault, std::int64_t wrong) {
    args.call_status = static_cast<std::int32_t>(fault);
    args.wrong = wrong;
  };
  if (routing.tokens < 0) {
    refuse(PlanFault::negative_tokens, routing.tokens);
  } else if (routing.tokens > config().max_tokens) {
    refuse(PlanFault::too_many_tokens, routing.tokens);
  } else if (routing.topk != config().topk && routing.tokens > 0) {
    refuse(PlanFault::bad_topk, routing.topk);
  } else if (routing.ids == nullptr && routing.tokens > 0) {
    refuse(PlanFault::no_ids, routing.tokens);
  }
  args.plan.tokens = args.call_status == 0 ? static_cast<std::int32_t>(routing.tokens) : 0;
  return args;
}

void CudaExchange::plan(const Routing& routing, DevicePlan& device_plan) {
  const DeviceGuard guard(device_.ordinal);
  throw_if_failed();
  CudaPlan& plan = own_plan(device_plan, Stage::plan);
  kernel::CountArgs args = count_args(routing, plan);
  check_device_memory(Stage::plan, "ids", args.plan.tokens > 0 ? routing.ids : nullptr);
  check_device_memory(Stage::plan, "weights", args.plan.tokens > 0 ? routing.weights : nullptr);
  launches_->launch(
      local_, args, stream_, at(Stage::plan),
      [this](auto& table, int ranks, cudaStream_t stream) {
        for (int rank = 0; rank < ranks; ++rank) {
          kernel::CountArgs& each = table.rank[rank];
          each.chunk_tokens =
              kernel::choose_chunk_tokens(each.plan.tokens, num_sms_, config().topk);
        }
        return kernel::launch_count(table, ranks, shared_bytes_, stream);
      },
      plan.filled_event());
  plan.filled(args.plan.tokens, ++plans_, placements_);
}

}  // namespace wherry::cuda
