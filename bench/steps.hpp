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

  // What the number formats on the way cost in accuracy: squares of all outputs of the last step,
  // and of their differences from the reference without those formats. Of this rank.
  struct Squares {
    double errors = 0, values = 0;
  };
  [[nodiscard]] Squares squares(Experts experts) const;

  [[nodiscard]] int in_flight() const noexcept { return static_cast<int>(batches_.size()); }
  [[nodiscard]] const Exchange& exchange() const noexcept { return exchange_; }
  [[nodiscard]] const PlanData& plan() const noexcept { return batches_.front().plan.to_host(); }

 private:
  struct Batch {
    Shape shape;  // of its own seed
    Workload work;
    Rows out;
    Plan plan;
    Received received;
    Rows plain;        // the received rows in bf16, where they travel in another format
    Rows own_results;  // where combine_input() has no room for results
    TensorView results;
    Exchange::DispatchHandle dispatch;
    Exchange::CombineHandle combine;
  };
  void dispatch(Sample& sample);
  void run_experts(Sample& sample, Experts experts);
  void combine(Sample& sample);
  void make_plain(Batch& batch) const;
  [[nodiscard]] Travel travel() const;
  [[nodiscard]] Sum sum() const noexcept;
  [[nodiscard]] TensorView view(const Rows& rows) const;
  [[nodiscard]] std::int64_t involuntary_switches() const;

  const Job& job_;
  Meeting& meeting_;
  Exchange exchange_;
  std::vector<Batch> batches_;
};

}  // namespace wherry::bench
