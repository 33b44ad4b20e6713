// Stage 2, plan(), and the placement that it plans by.
#include "plan/plan.hpp"

#include <algorithm>
#include <cstring>

#include "exchange/device.hpp"
#include "exchange/state.hpp"
#include "support/check.hpp"

namespace wherry {

using layout::Channel;

Plan Exchange::make_plan() const {
  if (device_) {
    Plan plan;
    plan.device_ = device_->make_plan();
    return plan;
  }
  const auto choices = static_cast<std::size_t>(state_->config.max_tokens * state_->config.topk);
  Plan plan;
  PlanData& data = plan.data_;
  for (auto* column : {&data.dest, &data.slot, &data.row, &data.token_row})
    column->reserve(choices);
  data.weight.reserve(choices);
  data.repeat.reserve(choices);
  plan.exchange_id_ = state_->id;
  return plan;
}

DevicePlan& Exchange::on_device(const Plan& plan, Stage stage) const {
  WHERRY_CHECK(
      plan.device_ != nullptr, ErrorCode::misuse, (Error::Where{stage, rank(), -1}),
      "the plan was made by another exchange (or by none); use this exchange's make_plan()");
  return *plan.device_;
}

// What the host knows of a plan that the device fills. A routing that is refused has no tokens.
void Exchange::fill_shape(const Routing& routing, Plan& plan) const {
  PlanData& data = plan.data_;
  data.tokens = std::clamp<std::int64_t>(routing.tokens, 0, config().max_tokens);
  data.topk = config().topk;
  data.send_begin = data.home_begin = 0;
  data.send_end = data.home_end = data.tokens;
  plan.filled_ = true;
}

void Exchange::plan(const Routing& routing, Plan& plan) {
  if (device_) {
    device_->plan(routing, on_device(plan, Stage::plan));
    return fill_shape(routing, plan);
  }
  State& s = *state_;
  s.check();
  WHERRY_CHECK(
      plan.exchange_id_ == s.id, ErrorCode::misuse, State::where(Stage::plan, s.rank),
      "the plan was made by another exchange (or by none); use this exchange's make_plan()");
  plan.filled_ = false;
  // Wherever this throws it leaves an empty plan, not half of one.
  struct EmptyUnlessFilled {
    Plan& plan;
    explicit EmptyUnlessFilled(Plan& plan_in) : plan(plan_in) {}
    EmptyUnlessFilled(const EmptyUnlessFilled&) = delete;
    EmptyUnlessFilled& operator=(const EmptyUnlessFilled&) = delete;
    ~EmptyUnlessFilled() {
      if (!plan.filled_) plan.data_ = {};
    }
  };
  const EmptyUnlessFilled at_exit(plan);
  const std::uint64_t serial = ++s.plans;
  const Window::Signal signal{Channel::counts, serial % layout::kCountGenerations,
                              static_cast<std::uint32_t>((serial + 1) / layout::kCountGenerations)};
  const layout::WindowLayout& l = s.window.layout();
  const auto num_entries = static_cast<std::size_t>(l.num_count_entries);

  std::vector<std::int32_t> entries(num_entries);
  layout::CountHeader mine =
      count_routing(routing, s.config, s.placement, s.rank, plan.data_, entries);
  mine.placement = s.placement_hash;
  for (int peer = 0; peer < s.size; ++peer) {
    std::byte* const message =
        s.window.base(peer) +
        l.count_message(signal.generation, static_cast<std::uint64_t>(s.rank));
    std::memcpy(message, &mine, sizeof(mine));
    std::memcpy(message + layout::kCountHeaderBytes, entries.data(),
                num_entries * sizeof(std::int32_t));
  }
  std::fill(s.signal_counts.begin(), s.signal_counts.end(),
            static_cast<std::uint32_t>(plan.data_.tokens));
  s.window.signal_all(signal, s.signal_counts);
  s.window.wait_all(signal, {Stage::plan, serial}, s.signal_counts);

  std::vector<CountsOf> counts;
  std::uint64_t first_placement = 0;   // rank 0's
  layout::CountHeader first_of_set{};  // of the ranks that hold the same tokens
  for (int peer = 0; peer < s.size; ++peer) {
    const std::byte* const message =
        s.window.own() + l.count_message(signal.generation, static_cast<std::uint64_t>(peer));
    layout::CountHeader header;
    std::memcpy(&header, message, sizeof(header));
    WHERRY_CHECK(header.status == static_cast<std::int32_t>(PlanFault::none),
                 code_of(static_cast<PlanFault>(header.status)),
                 (Error::Where{Stage::plan, s.rank, peer}), "{}",
                 describe_fault(header, s.config, s.placement));
    if (peer == 0) first_placement = header.placement;
    if (peer % s.config.replicated == 0) first_of_set = header;
    WHERRY_CHECK(header.tokens == first_of_set.tokens && header.id == first_of_set.id,
                 ErrorCode::bad_routing, (Error::Where{Stage::plan, s.rank, peer}),
                 "ranks {} and {} hold the same tokens (replicated is {}) but have different "
                 "routings ({} and {} tokens); give all of them the same ids and weights",
                 peer / s.config.replicated * s.config.replicated, peer, s.config.replicated,
                 first_of_set.tokens, header.tokens);
    WHERRY_CHECK(header.placement == first_placement, ErrorCode::config_mismatch,
                 (Error::Where{Stage::plan, s.rank, peer}),
                 "rank {} has another placement than rank 0: call set_placement() on all ranks, "
                 "between the same two plans",
                 peer);
    counts.emplace_back(reinterpret_cast<const std::int32_t*>(message + layout::kCountHeaderBytes),
                        num_entries);
  }
  assign_rows(counts, s.config, s.placement, s.capacity, s.rank, plan.data_, s.loads);
  plan.serial_ = serial;
  plan.placement_ = s.placements;
  plan.filled_ = true;
}

// FNV-1a. Slots stay what they are, so the experts in them tell placements apart.
std::uint64_t hash_of(const Placement& placement) noexcept {
  std::uint64_t hash = 0xCBF29CE484222325ULL;
  for (const int expert : placement.slot_to_expert()) {
    hash = (hash ^ static_cast<std::uint32_t>(expert)) * 0x100000001B3ULL;
  }
  return hash;
}

void check_switch(const Placement& placement, const Placement& old, int rank) {
  const Error::Where where{Stage::placement, rank, -1};
  WHERRY_CHECK(placement.num_experts() == old.num_experts(), ErrorCode::bad_argument, where,
               "placement has {} experts; the exchange has {}", placement.num_experts(),
               old.num_experts());
  WHERRY_CHECK(std::ranges::equal(placement.slot_begin(), old.slot_begin()),
               ErrorCode::bad_argument, where,
               "placement has the slots [{}) on its ranks; the exchange was made for [{})",
               fmt::join(placement.slot_begin(), " "), fmt::join(old.slot_begin(), " "));
}

void Exchange::set_placement(const Placement& placement) {
  if (device_) return device_->set_placement(placement);
  State& s = *state_;
  s.check();
  const auto where = State::where(Stage::placement, s.rank);
  WHERRY_CHECK(!s.in_flight(), ErrorCode::misuse, where,
               "a dispatch or combine is in flight; finish it first");
  check_switch(placement, s.placement, s.rank);
  s.placement = placement;
  s.config.placement = placement;
  s.placement_hash = hash_of(placement);
  ++s.placements;
}

}  // namespace wherry
