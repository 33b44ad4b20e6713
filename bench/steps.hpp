// The steps of one rank: plan, dispatch, experts, combine, and when each of them ended.
#pragma once

#include <cstdint>
#include <vector>

#include "measure.hpp"
#include "meeting.hpp"
#include "wherry/exchange.hpp"

namespace wherry::bench {

// One step on one rank. Times in nanoseconds of now_ns().
struct Sample {
  std::int64_t begin, planned, dispatch_sent, dispatched;
  std::int64_t experts_begin, experts_end;
  std::int64_t combine_begin, combine_sent, combined;
  std::int64_t switches;  // involuntary, inside the timed parts
};

class Steps {
 public:
  // Collective.
  Steps(const Group& group, const Job& job, Meeting& meeting);

  // Collective: one step of every micro-batch in flight.
  [[nodiscard]] Sample run(Experts experts);

  // Compares the outputs of the last step bit for bit with the dense reference; throws internal
  // naming the first element that differs. Clears them, so that a step that writes nothing is seen.
  void verify(Experts experts);

  [[nodiscard]] int in_flight() const noexcept { return static_cast<int>(batches_.size()); }
  [[nodiscard]] const Exchange& exchange() const noexcept { return exchange_; }
  [[nodiscard]] const Rows& x() const noexcept { return batches_.front().work.x; }
  [[nodiscard]] const PlanData& plan() const noexcept { return batches_.front().plan.to_host(); }

 private:
  struct Batch {
    Shape shape;  // of its own seed
    Workload work;
    Rows out;
    Plan plan;
    Received received;
    TensorView results;
    Exchange::DispatchHandle dispatch;
    Exchange::CombineHandle combine;
  };
  void dispatch(Sample& sample);
  void run_experts(Sample& sample, Experts experts);
  void combine(Sample& sample);
  [[nodiscard]] TensorView view(const Rows& rows) const;
  [[nodiscard]] std::int64_t involuntary_switches() const;

  const Job& job_;
  Meeting& meeting_;
  Exchange exchange_;
  std::vector<Batch> batches_;
};

}  // namespace wherry::bench
