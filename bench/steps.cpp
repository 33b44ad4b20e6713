#include "steps.hpp"

#include <sys/resource.h>

#include <vector>

#include "exchange/config.hpp"
#include "experts.hpp"
#include "format/round_trip.hpp"
#include "kernels/wires.hpp"
#include "support/check.hpp"

namespace wherry::bench {

Steps::Steps(const Group& group, const Job& job, Meeting& meeting)
    : job_(job),
      meeting_(meeting),
      exchange_(group, job.config) {
  const int in_flight = job.halves ? job.config.depth : 1;
  for (int i = 0; i < in_flight; ++i) {
    Shape shape = job.shape;
    shape.seed += static_cast<unsigned>(i) * 7919U;
    batches_.push_back({shape,
                        make_workload(shape, group.rank()),
                        Rows(shape.tokens, shape.row_bytes()),
                        exchange_.make_plan(),
                        {},
                        {},
                        {},
                        {},
                        {},
                        {}});
    batches_.back().out.fill(0xFF);
  }
}

Sample Steps::run(Experts experts) {
  Sample sample{};
  meeting_.meet();
  dispatch(sample);
  meeting_.meet();
  run_experts(sample, experts);
  meeting_.meet();
  combine(sample);
  return sample;
}

void Steps::dispatch(Sample& sample) {
  const std::int64_t switches = involuntary_switches();
  sample.begin = now_ns();
  for (Batch& batch : batches_) {
    exchange_.plan(
        {batch.work.ids.data(), batch.work.weights.data(), batch.shape.tokens, batch.shape.topk},
        batch.plan);
  }
  sample.planned = now_ns();
  for (Batch& batch : batches_)
    batch.dispatch = exchange_.dispatch_begin(batch.plan, view(batch.work.x));
  sample.dispatch_sent = now_ns();
  for (Batch& batch : batches_) batch.received = batch.dispatch.finish();
  sample.dispatched = now_ns();
  sample.switches += involuntary_switches() - switches;
}

void Steps::run_experts(Sample& sample, Experts experts) {
  sample.experts_begin = now_ns();
  for (Batch& batch : batches_) {
    if (!batch.received.wire.keeps_dtype()) make_plain(batch);
    if (mode_of(exchange_.config()).keeps_results()) {
      batch.results = exchange_.combine_input(batch.plan);
    } else {
      const std::int64_t rows = batch.received.rows.rows;
      if (batch.own_results.rows() < rows) batch.own_results = Rows(rows, batch.shape.row_bytes());
      batch.results = view(batch.own_results);
      batch.results.rows = rows;
    }
    bench::run_experts(exchange_, batch.received, experts, batch.results);
  }
  sample.experts_end = now_ns();
}

// The experts here want bf16: real ones have kernels for the format.
void Steps::make_plain(Batch& batch) const {
  Received& received = batch.received;
  const std::int64_t rows = received.rows.rows;
  if (batch.plain.rows() < rows) batch.plain = Rows(rows, batch.shape.row_bytes());
  const bool by_slot = exchange_.config().layout != Layout::tokens;
  std::vector<std::byte> scales(static_cast<std::size_t>(received.wire.scale_bytes));
  const auto convert = [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      kernels::get_scales(received.wire, static_cast<const std::byte*>(received.scales),
                          received.scale_rows, row, scales.data());
      dequantize_row(received.wire, received.rows.row(row), scales.data(), batch.plain.row(row));
    }
  };
  if (!by_slot) convert(0, rows);
  for (std::size_t s = 0; by_slot && s < received.slot_counts.size(); ++s) {
    convert(received.slot_begin[s], received.slot_begin[s] + received.slot_counts[s]);
  }
  received.rows = view(batch.plain);
  received.rows.rows = rows;
}

Sum Steps::sum() const noexcept {
  return exchange_.config().effective_reduction() == Reduction::by_token ? Sum::by_token
                                                                         : Sum::by_rank;
}

Travel Steps::travel() const {
  const ExchangeConfig& config = exchange_.config();
  Travel travel;
  const auto out = wire_format(config.dispatch_wire, config.dtype, config.hidden);
  if (!out.keeps_dtype()) {
    travel.out = [=](std::vector<std::uint16_t>& x) { round_trip_row(out, x.data()); };
  }
  if (!wire_format(config.combine_wire, config.dtype, config.hidden).keeps_dtype()) {
    const auto home = wire_format(config.combine_wire, DType::f32, config.hidden);
    travel.home = [=](std::vector<float>& row) { round_trip_row(home, row.data()); };
  }
  travel.rounds_first = config.layout == Layout::tokens;  // by the experts, who return bf16
  return travel;
}

void Steps::combine(Sample& sample) {
  const std::int64_t switches = involuntary_switches();
  sample.combine_begin = now_ns();
  for (Batch& batch : batches_)
    batch.combine = exchange_.combine_begin(batch.plan, batch.results, view(batch.out));
  sample.combine_sent = now_ns();
  for (Batch& batch : batches_) batch.combine.finish();
  sample.combined = now_ns();
  sample.switches += involuntary_switches() - switches;
}

void Steps::verify(Experts experts) {
  const Travel formats = travel();
  for (std::size_t b = 0; b < batches_.size(); ++b) {
    const Batch& batch = batches_[b];
    for (std::int64_t token = 0; token < batch.shape.tokens; ++token) {
      const auto want = dense_token(batch.shape, batch.work, experts, sum(), token, formats);
      const std::uint16_t* const got = batch.out.row(token);
      for (std::size_t h = 0; h < want.size(); ++h) {
        WHERRY_CHECK(got[h] == want[h], ErrorCode::internal,
                     (Error::Where{Stage::combine_recv, exchange_.rank(), -1}),
                     "wrong result: batch {}, token {}, column {}: expected {}, got {}", b, token,
                     h, widen(want[h]), widen(got[h]));
      }
    }
    batches_[b].out.fill(0xFF);
  }
}

Steps::Squares Steps::squares(Experts experts) const {
  Squares squares;
  for (const Batch& batch : batches_) {
    for (std::int64_t token = 0; token < batch.shape.tokens; ++token) {
      const auto plain = dense_token(batch.shape, batch.work, experts, sum(), token);
      const std::uint16_t* const got = batch.out.row(token);
      for (std::size_t h = 0; h < plain.size(); ++h) {
        const double value = widen(plain[h]);
        const double error = static_cast<double>(widen(got[h])) - value;
        squares.errors += error * error;
        squares.values += value * value;
      }
    }
  }
  return squares;
}

TensorView Steps::view(const Rows& rows) const {
  TensorView view;
  view.data = rows.data();
  view.dtype = DType::bf16;
  view.rows = rows.rows();
  view.cols = job_.shape.hidden;
  view.pitch_bytes = rows.pitch();
  return view;
}

// Of this rank: as a process with all its threads, else of the thread that is the rank. A
// sched_yield() that lets another rank run counts too: the kernel does not tell them apart.
std::int64_t Steps::involuntary_switches() const {
  rusage usage{};
  getrusage(job_.processes ? RUSAGE_SELF : RUSAGE_THREAD, &usage);
  return usage.ru_nivcsw;
}

}  // namespace wherry::bench
