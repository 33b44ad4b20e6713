#include "steps.hpp"

#include <sys/resource.h>

#include "experts.hpp"
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
    batch.results = exchange_.combine_input(batch.plan);
    bench::run_experts(exchange_, batch.received, experts, batch.results);
  }
  sample.experts_end = now_ns();
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
  const Sum sum = exchange_.config().effective_reduction() == Reduction::by_token ? Sum::by_token
                                                                                  : Sum::by_rank;
  for (std::size_t b = 0; b < batches_.size(); ++b) {
    const Batch& batch = batches_[b];
    for (std::int64_t token = 0; token < batch.shape.tokens; ++token) {
      const auto want = dense_token(batch.shape, batch.work, experts, sum, token);
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
