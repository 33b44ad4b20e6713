// Construction, plan() and what is common to dispatch and combine.
#include "wherry/exchange.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>

#include "exchange/device.hpp"
#include "exchange/state.hpp"
#include "fabric/addressable.hpp"
#include "group/state.hpp"
#include "kernels/wires.hpp"
#include "plan/plan.hpp"
#include "support/check.hpp"

namespace wherry {

using layout::Channel;

namespace {

std::string serialise(const ExchangeConfig& config, int ranks) {
  std::string text;
  for (const auto& [field, value] : config.describe(ranks))
    text += fmt::format("{}={}\n", field, value);
  return text;
}

std::vector<std::string> lines(const Group::Bytes& bytes) {
  std::vector<std::string> result(1);
  for (const std::byte byte : bytes) {
    const char c = static_cast<char>(byte);
    if (c == '\n') {
      result.emplace_back();
    } else {
      result.back() += c;
    }
  }
  result.pop_back();
  return result;
}

std::shared_ptr<MappedWindow> map(const Group& group, std::uint64_t bytes,
                                  const ExchangeConfig& config) {
  auto mapped = std::make_shared<MappedWindow>();
  mapped->fabric = group.state().connect(group, {bytes, config.populate, config.deadline});
  return mapped;
}

std::uint64_t next_id() {
  static std::atomic<std::uint64_t> next{1};
  return next.fetch_add(1);
}

}  // namespace

void agree(const Group& group, Device device, const ExchangeConfig& config) {
  // A configuration that is wrong by itself is not described; its rank says so with an empty text.
  std::string mine;
  std::string problem;
  try {
    check_config(config, group.rank(), group.size());
    if (device.kind == Device::Kind::cpu) static_cast<void>(kernels::find(config.kernels));
    mine = fmt::format("device={}\n{}", name(device.kind), serialise(config, group.size()));
  } catch (const Error& error) {
    problem = error.message();
  }
  const auto all = group.allgather(std::as_bytes(std::span(mine)));
  if (!problem.empty())
    throw Error(ErrorCode::bad_argument, {Stage::startup, group.rank(), -1}, problem);
  for (std::size_t peer = 0; peer < all.size(); ++peer) {
    WHERRY_CHECK(!all[peer].empty(), ErrorCode::bad_argument,
                 (Error::Where{Stage::startup, group.rank(), static_cast<int>(peer)}),
                 "rank {} has an illegal configuration; its own error says which field", peer);
  }
  const std::vector<std::string> first = lines(all[0]);
  for (std::size_t peer = 1; peer < all.size(); ++peer) {
    const std::vector<std::string> other = lines(all[peer]);
    for (std::size_t i = 0; i < std::min(first.size(), other.size()); ++i) {
      if (first[i] == other[i]) continue;
      const std::size_t split = first[i].find('=') + 1;
      throw Error(
          ErrorCode::config_mismatch, {Stage::startup, group.rank(), static_cast<int>(peer)},
          fmt::format("{} is {} on rank 0 and {} on rank {}", first[i].substr(0, split - 1),
                      first[i].substr(split), other[i].substr(other[i].find('=') + 1), peer));
    }
  }
}

// FNV-1a. Slots stay what they are, so the experts in them tell placements apart.
std::uint64_t hash_of(const Placement& placement) noexcept {
  std::uint64_t hash = 0xCBF29CE484222325ULL;
  for (const int expert : placement.slot_to_expert()) {
    hash = (hash ^ static_cast<std::uint32_t>(expert)) * 0x100000001B3ULL;
  }
  return hash;
}

Exchange::State::State(const Group& group, const ExchangeConfig& config_in, const Share& share)
    : id(next_id()),
      config((agree(group, Device::cpu(), config_in), config_in)),
      placement(placement_of(config, group.size())),
      capacity(capacity_of(config, placement)),
      mode(mode_of(config)),
      kernels(&kernels::find(config.kernels)),
      rank(group.rank()),
      size(group.size()),
      window(group,
             share.mapped != nullptr
                 ? share.mapped
                 : map(group, layout::make_window_layout(capacity.params).bytes, config),
             share.begin, layout::make_window_layout(capacity.params, share.rows_begin),
             config.deadline),
      team(config.num_threads),
      generations(static_cast<std::size_t>(config.depth)),
      placement_hash(hash_of(placement)),
      loads(static_cast<std::size_t>(config.experts), 0),
      signal_counts(static_cast<std::size_t>(size), 0) {
  group.barrier();  // nobody signals before everybody has mapped
}

Exchange::State::~State() {
  MappedWindow& mapped = window.mapped();
  if (mapped.user == this) mapped.user = &mapped;
}

Exchange::Exchange(const Group& group, const ExchangeConfig& config)
    : state_(std::make_unique<State>(group, config, Share{})) {}
Exchange::Exchange(std::unique_ptr<State> state) : state_(std::move(state)) {}
Exchange::Exchange(Exchange&&) noexcept = default;
Exchange& Exchange::operator=(Exchange&&) noexcept = default;
Exchange::~Exchange() = default;

Exchange::Exchange(const Group& group, Device device, const ExchangeConfig& config) {
  switch (device.kind) {
    case Device::Kind::cpu: state_ = std::make_unique<State>(group, config, Share{}); break;
    case Device::Kind::cuda: device_ = make_device_exchange(group, device, config); break;
  }
}

const ExchangeConfig& Exchange::config() const noexcept {
  return device_ ? device_->config() : state_->config;
}
const Placement& Exchange::placement() const noexcept {
  return device_ ? device_->placement() : state_->placement;
}
int Exchange::rank() const noexcept { return device_ ? device_->rank() : state_->rank; }
int Exchange::size() const noexcept { return device_ ? device_->size() : state_->size; }
std::string_view Exchange::kernels() const noexcept {
  return device_ ? device_->kernels() : state_->kernels->name;
}
std::string_view Exchange::fabric() const noexcept {
  return device_ ? device_->fabric() : state_->window.fabric();
}
std::uint64_t Exchange::window_bytes() const noexcept {
  return device_ ? device_->window_bytes() : state_->window.layout().bytes;
}
Device Exchange::device() const noexcept { return device_ ? device_->device() : Device::cpu(); }
void Exchange::set_stream(void* stream) {
  if (device_) device_->set_stream(stream);
}
void Exchange::check() { device_ ? device_->check() : state_->check(); }
std::span<const std::int64_t> Exchange::loads() const {
  return device_ ? device_->loads() : state_->loads;
}
void Exchange::reset_loads() {
  if (device_) return device_->reset_loads();
  std::ranges::fill(state_->loads, 0);
}
Traffic Exchange::traffic() const noexcept { return device_ ? Traffic{} : state_->traffic; }

std::vector<Exchange> make_sharing_exchanges(const Group& group,
                                             std::span<const ExchangeConfig> configs) {
  WHERRY_CHECK(!configs.empty(), ErrorCode::bad_argument,
               (Error::Where{Stage::startup, group.rank(), -1}), "configs is empty");
  // Headers, signals and counts lie one behind the other; then come the rows, which all share.
  std::vector<layout::WindowParams> params;
  std::uint64_t rows_begin = 0;
  for (const ExchangeConfig& config : configs) {
    agree(group, Device::cpu(), config);
    params.push_back(capacity_of(config, placement_of(config, group.size())).params);
    rows_begin += layout::control_bytes(params.back());
  }
  std::vector<Share> shares;
  std::uint64_t begin = 0;
  std::uint64_t bytes = 0;
  for (const layout::WindowParams& p : params) {
    shares.push_back({nullptr, begin, rows_begin - begin});
    bytes = std::max(bytes, begin + layout::make_window_layout(p, rows_begin - begin).bytes);
    begin += layout::control_bytes(p);
  }
  const std::shared_ptr<MappedWindow> mapped = map(group, bytes, configs.front());
  std::vector<Exchange> exchanges;
  for (std::size_t i = 0; i < configs.size(); ++i) {
    shares[i].mapped = mapped;
    exchanges.push_back(Exchange(std::make_unique<Exchange::State>(group, configs[i], shares[i])));
  }
  return exchanges;
}

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

void Exchange::State::check() const {
  if (const auto fault = window.fault()) throw *fault;
}

void Exchange::State::end(ErrorCode code, const Error::Where& where, std::uint64_t step,
                          const std::string& problem) {
  window.raise(code, where.stage, where.peer >= 0 ? where.peer : rank, step);
  throw Error(code, where, problem);
}

void Exchange::State::refuse(Stage stage, std::uint64_t step, const std::string& problem) {
  end(ErrorCode::bad_argument, where(stage, rank), step, problem);
}

kernels::Windows Exchange::State::windows(std::uint64_t generation) const noexcept {
  return {window.layout(), window.bases(), rank, size, generation};
}

std::int64_t Exchange::State::payload_rows(const Generation& generation) const noexcept {
  return mode.sends_token_rows() ? generation.token_rows : generation.slot_begin.back();
}

void Exchange::State::check_plan(const Plan& plan, Stage stage) const {
  WHERRY_CHECK(
      plan.exchange_id_ == id, ErrorCode::misuse, where(stage, rank),
      "the plan was made by another exchange (or by none); use this exchange's make_plan()");
  WHERRY_CHECK(plan.filled_, ErrorCode::misuse, where(stage, rank),
               "the plan has not been filled by plan()");
}

Exchange::State::Shape Exchange::State::on_wire(std::int64_t rows) const noexcept {
  const WireFormat& wire = mode.dispatch_wire;
  if (wire.quantised()) return {DType::raw, rows, wire.payload_bytes};
  return {kernels::plain_dtype(wire.wire), rows, config.hidden};
}

void Exchange::State::check_tensor(Stage stage, std::uint64_t step, const char* argument,
                                   const ConstTensorView& tensor, const Shape& shape) {
  const bool right_shape =
      tensor.rows == shape.rows && tensor.cols == shape.cols && tensor.dtype == shape.dtype;
  if (!right_shape) {
    refuse(
        stage, step,
        fmt::format("{} is {} [{}, {}]; this call needs {} [{}, {}]", argument, name(tensor.dtype),
                    tensor.rows, tensor.cols, name(shape.dtype), shape.rows, shape.cols));
  }
  if (shape.rows > 0 && tensor.data == nullptr)
    refuse(stage, step, fmt::format("{} is null", argument));
  if (tensor.pitch() < tensor.row_bytes()) {
    refuse(stage, step,
           fmt::format("{} has a pitch of {} bytes; its rows have {}", argument, tensor.pitch(),
                       tensor.row_bytes()));
  }
}

void Exchange::State::check_out(const TensorView& out, const PlanData& plan) {
  const std::int64_t rows =
      mode.sends_token_rows() ? plan.token_rows_received : plan.slot_begin.back();
  if (out.rows < rows || out.cols != config.hidden || out.dtype != config.dtype) {
    refuse(Stage::dispatch_send, steps + 1,
           fmt::format("out is {} [{}, {}]; this call needs {} [at least {}, {}]", name(out.dtype),
                       out.rows, out.cols, name(config.dtype), rows, config.hidden));
  }
  if (rows > 0 && out.data == nullptr) refuse(Stage::dispatch_send, steps + 1, "out is null");
}

Generation* Exchange::State::oldest_uncombined(std::uint64_t plan_serial) noexcept {
  if (window.mapped().user != this) return nullptr;  // its rows are another exchange's now
  Generation* oldest = nullptr;
  for (Generation& generation : generations) {
    if (generation.phase != Phase::received || generation.plan_serial != plan_serial) continue;
    if (oldest == nullptr || generation.step < oldest->step) oldest = &generation;
  }
  return oldest;
}

void Exchange::State::send_credits(Generation& generation) {
  const auto index = static_cast<std::uint64_t>(&generation - generations.data());
  ++generation.credit_epoch;
  std::fill(signal_counts.begin(), signal_counts.end(), 0U);
  window.signal_all({Channel::credit, index, generation.credit_epoch}, signal_counts);
}

bool Exchange::State::in_flight() const noexcept {
  return std::any_of(generations.begin(), generations.end(), [](const Generation& g) {
    return g.phase == Phase::sending || g.phase == Phase::combining;
  });
}

void Exchange::State::take_window(Stage stage) {
  MappedWindow& mapped = window.mapped();
  if (mapped.user == this) return;
  if (mapped.user != nullptr) {
    const bool gone = mapped.user == &mapped;
    WHERRY_CHECK(gone || !static_cast<const State*>(mapped.user)->in_flight(), ErrorCode::misuse,
                 where(stage, rank),
                 "another exchange of this window has a dispatch or combine in flight");
    std::fill(signal_counts.begin(), signal_counts.end(), 0U);
    const Window::Signal signal{Channel::handover, 0, ++handovers};
    window.signal_all(signal, signal_counts);
    window.wait_all(signal, {stage, steps + 1}, signal_counts);
  }
  mapped.user = this;
  // What this exchange had received before the others' turns is overwritten.
  for (Generation& g : generations) {
    if (g.phase == Phase::received) g.phase = Phase::lost;
  }
}

Generation& Exchange::State::enter(Stage stage, bool alone) {
  const std::uint64_t step = steps + 1;
  const std::uint64_t index = generation_of(step);
  Generation& g = generations[index];
  WHERRY_CHECK(g.phase != Phase::sending && g.phase != Phase::combining, ErrorCode::misuse,
               where(stage, rank),
               "step {} needs the generation of step {}, whose {} has not finished; depth is {}",
               step, g.step, g.phase == Phase::sending ? "dispatch" : "combine", config.depth);
  take_window(stage);
  // Paired use frees itself (design 5.4). Otherwise, and before a lone combine, whose results nobody's
  // dispatch signal has freed, every rank says that it is done with the last use (5.6).
  const bool used = g.phase != Phase::unused;
  const bool paired = g.phase == Phase::combined && !g.alone;
  if (used && (!paired || alone)) {
    if (g.phase != Phase::released) send_credits(g);
    window.wait_all({Channel::credit, index, g.credit_epoch}, {stage, step}, signal_counts);
  }
  steps = step;
  g.step = step;
  g.alone = alone;
  return g;
}

}  // namespace wherry
