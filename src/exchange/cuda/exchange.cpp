// What is common to plan, dispatch and combine on a GPU: faults, checks of calls, loads, placement.
#include "exchange/cuda/exchange.hpp"

#include <atomic>
#include <span>

#include "kernels/cuda/launch.hpp"
#include "kernels/wires.hpp"
#include "support/check.hpp"

namespace wherry::cuda {

namespace kernel = kernels::cuda;

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
