// Construction, and what is common to dispatch and combine.
#include "wherry/exchange.hpp"

#include <algorithm>
#include <atomic>
#include <string>

#include "exchange/device.hpp"
#include "exchange/state.hpp"
#include "group/state.hpp"
#include "kernels/wires.hpp"
#include "support/check.hpp"

namespace wherry {

using layout::Channel;

namespace {

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

namespace {

void check_no_memory(const Group& group, std::span<std::byte> window) {
  WHERRY_CHECK(window.empty(), ErrorCode::unsupported,
               (Error::Where{Stage::startup, group.rank(), -1}),
               "memory for the window can be given on CUDA only");
}

}  // namespace

Exchange::Exchange(const Group& group, Device device, const ExchangeConfig& config,
                   std::span<std::byte> window) {
  switch (device.kind) {
    case Device::Kind::cpu:
      check_no_memory(group, window);
      state_ = std::make_unique<State>(group, config, Share{});
      break;
    case Device::Kind::cuda:
      device_ = std::move(make_device_exchanges(group, device, {&config, 1}, window).front());
      break;
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

Exchange::Exchange(std::unique_ptr<DeviceExchange> device) : device_(std::move(device)) {}

std::vector<Exchange> make_sharing_exchanges(const Group& group,
                                             std::span<const ExchangeConfig> configs) {
  return make_sharing_exchanges(group, Device::cpu(), configs, {});
}

std::vector<Exchange> make_sharing_exchanges(const Group& group, Device device,
                                             std::span<const ExchangeConfig> configs,
                                             std::span<std::byte> window) {
  WHERRY_CHECK(!configs.empty(), ErrorCode::bad_argument,
               (Error::Where{Stage::startup, group.rank(), -1}), "configs is empty");
  std::vector<Exchange> exchanges;
  if (device.kind == Device::Kind::cuda) {
    for (auto& made : make_device_exchanges(group, device, configs, window)) {
      exchanges.push_back(Exchange(std::move(made)));
    }
    return exchanges;
  }
  check_no_memory(group, window);
  std::vector<layout::WindowParams> params;
  for (const ExchangeConfig& config : configs) {
    agree(group, device, config);
    params.push_back(capacity_of(config, placement_of(config, group.size())).params);
  }
  const SharedLayout shared = share_window(params);
  const std::shared_ptr<MappedWindow> mapped = map(group, shared.bytes, configs.front());
  for (std::size_t i = 0; i < configs.size(); ++i) {
    exchanges.push_back(Exchange(std::make_unique<Exchange::State>(
        group, configs[i], Share{mapped, shared.places[i].begin, shared.places[i].rows_begin})));
  }
  return exchanges;
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
