#include "measure.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <span>

#include "floor.hpp"
#include "steps.hpp"

namespace wherry::bench {

namespace {

// Steps and floor passes take turns in blocks, so that both see the same moods of the machine; the
// first of a block finds the caches as the other kind left them and is not counted.
constexpr int kBlock = 10;

struct Samples {
  std::vector<Sample> steps;
  std::vector<Floor::Pass> streaming, ordinary;  // floor passes
};

// Of every rank, [rank][i].
template <typename T>
std::vector<std::vector<T>> gather(const Group& group, const std::vector<T>& mine) {
  std::vector<std::vector<T>> all;
  for (const Group::Bytes& bytes : group.allgather(std::as_bytes(std::span(mine)))) {
    auto& theirs = all.emplace_back(bytes.size() / sizeof(T));
    if (!bytes.empty()) std::memcpy(theirs.data(), bytes.data(), bytes.size());
  }
  return all;
}

template <typename T>
T sum_over_ranks(const Group& group, T mine) {
  T sum = 0;
  for (const auto& theirs : gather(group, std::vector<T>{mine})) sum += theirs.front();
  return sum;
}

double to_us(std::int64_t nanoseconds) { return static_cast<double>(nanoseconds) / 1000.0; }

// The longest any rank took from `begin` to `end`, of every step.
template <typename T>
std::vector<double> slowest(const std::vector<std::vector<T>>& ranks, std::int64_t T::* begin,
                            std::int64_t T::* end) {
  std::vector<double> result(ranks.front().size(), 0.0);
  for (const auto& samples : ranks) {
    for (std::size_t i = 0; i < samples.size(); ++i)
      result[i] = std::max(result[i], to_us(samples[i].*end - samples[i].*begin));
  }
  return result;
}

// From the first rank that began to the last that ended, of every step.
template <typename T>
std::vector<double> span_of_all(const std::vector<std::vector<T>>& ranks, std::int64_t T::* begin,
                                std::int64_t T::* end) {
  std::vector<double> result;
  for (std::size_t i = 0; i < ranks.front().size(); ++i) {
    std::int64_t first = ranks.front()[i].*begin;
    std::int64_t last = ranks.front()[i].*end;
    for (const auto& samples : ranks) {
      first = std::min(first, samples[i].*begin);
      last = std::max(last, samples[i].*end);
    }
    result.push_back(to_us(last - first));
  }
  return result;
}

std::vector<double> add(std::vector<double> a, const std::vector<double>& b) {
  for (std::size_t i = 0; i < a.size(); ++i) a[i] += b[i];
  return a;
}

Samples take_samples(const Job& job, Steps& steps, Floor& floor, Meeting& meeting,
                     const Progress& say) {
  Samples samples;
  while (static_cast<int>(samples.steps.size()) < job.steps) {
    say(fmt::format("step {} of {}", samples.steps.size() + 1, job.steps));
    const int block = std::min(kBlock, job.steps - static_cast<int>(samples.steps.size()));
    static_cast<void>(steps.run(job.experts));
    for (int i = 0; i < block; ++i) samples.steps.push_back(steps.run(job.experts));
    for (const Stores stores : {Stores::streaming, Stores::ordinary}) {
      auto& passes = stores == Stores::streaming ? samples.streaming : samples.ordinary;
      static_cast<void>(floor.run(meeting, stores));
      for (int i = 0; i < block; ++i) passes.push_back(floor.run(meeting, stores));
    }
  }
  return samples;
}

void report_stages(const Group& group, const std::vector<Sample>& mine, int in_flight,
                   Report& report) {
  const auto ranks = gather(group, mine);
  const auto share = [in_flight](std::vector<double> values) {
    for (double& value : values) value /= in_flight;
    return spread_of(std::move(values));
  };
  const auto stage = [&](std::int64_t Sample::* begin, std::int64_t Sample::* end) {
    return share(slowest(ranks, begin, end));
  };
  report.plan = stage(&Sample::begin, &Sample::planned);
  report.dispatch_send = stage(&Sample::planned, &Sample::dispatch_sent);
  report.dispatch_recv = stage(&Sample::dispatch_sent, &Sample::dispatched);
  report.dispatch = stage(&Sample::planned, &Sample::dispatched);
  report.experts = stage(&Sample::experts_begin, &Sample::experts_end);
  report.combine_send = stage(&Sample::combine_begin, &Sample::combine_sent);
  report.combine_recv = stage(&Sample::combine_sent, &Sample::combined);
  report.combine = stage(&Sample::combine_begin, &Sample::combined);
  report.total = share(add(span_of_all(ranks, &Sample::begin, &Sample::dispatched),
                           span_of_all(ranks, &Sample::combine_begin, &Sample::combined)));
  double all = 0;
  for (const auto& samples : ranks) {
    double switches = 0;
    for (const Sample& sample : samples) switches += static_cast<double>(sample.switches);
    switches /= static_cast<double>(samples.size() * static_cast<std::size_t>(in_flight));
    report.worst_switches = std::max(report.worst_switches, switches);
    all += switches;
  }
  report.involuntary_switches = all / static_cast<double>(ranks.size());
}

void report_floor(const Group& group, const Samples& samples, const Floor& floor, Report& report) {
  const auto total = [&](const std::vector<Floor::Pass>& mine) {
    const auto ranks = gather(group, mine);
    using Pass = Floor::Pass;
    return spread_of(add(span_of_all(ranks, &Pass::dispatch_begin, &Pass::dispatch_end),
                         span_of_all(ranks, &Pass::combine_begin, &Pass::combine_end)));
  };
  const Spread streaming = total(samples.streaming);
  const Spread ordinary = total(samples.ordinary);
  const bool streams = streaming.p50 <= ordinary.p50;
  report.floor = streams ? streaming : ordinary;
  report.floor_with = streams ? Stores::streaming : Stores::ordinary;
  const auto moved = static_cast<double>(sum_over_ranks(group, floor.bytes()));
  report.copy_gbps = moved / (report.floor.p50 * 1000.0);
}

void report_traffic(const Group& group, const Traffic& before, const Traffic& after, int runs,
                    Report& report) {
  const auto of_all = [&](std::int64_t dispatch, std::int64_t combine) {
    return sum_over_ranks(group, dispatch + combine) / runs;
  };
  report.bytes = of_all(after.dispatch_bytes - before.dispatch_bytes,
                        after.combine_bytes - before.combine_bytes);
  report.link_bytes = of_all(after.dispatch_link_bytes - before.dispatch_link_bytes,
                             after.combine_link_bytes - before.combine_link_bytes);
}

}  // namespace

Spread spread_of(std::vector<double> microseconds) {
  if (microseconds.empty()) return {};
  std::ranges::sort(microseconds);
  const auto at = [&](double quantile) {
    const auto last = static_cast<double>(microseconds.size() - 1);
    return microseconds[static_cast<std::size_t>(std::lround(quantile * last))];
  };
  return {at(0.5), at(0.99), microseconds.front()};
}

Report measure(const Group& group, const Job& job, const Progress& progress) {
  const auto say = [&](std::string_view text) {
    if (group.rank() == 0 && progress) progress(text);
  };
  say("making windows and tokens");
  Meeting meeting(group, job.config.deadline);
  Steps steps(group, job, meeting);
  // Every generation is used and verified; with it every page is touched.
  say("verifying");
  Steps::Squares squares;
  const int rounds = std::max(job.warmup, job.config.depth);
  for (int i = 0; i < rounds; ++i) {
    static_cast<void>(steps.run(Experts::scale));
    if (i == 0) squares = steps.squares(Experts::scale);
    if (i < job.config.depth) steps.verify(Experts::scale);
  }
  Floor floor(group, job.config, steps.plan());
  const Exchange& exchange = steps.exchange();
  const Traffic before = exchange.traffic();
  const Samples samples = take_samples(job, steps, floor, meeting, say);
  const Traffic after = exchange.traffic();
  steps.verify(job.experts);

  Report report;
  exchange.kernels().copy(report.kernels, sizeof(report.kernels) - 1);
  exchange.fabric().copy(report.fabric, sizeof(report.fabric) - 1);
  report.window_bytes = exchange.window_bytes();
  const double values = sum_over_ranks(group, squares.values);
  if (values > 0) report.wire_error = std::sqrt(sum_over_ranks(group, squares.errors) / values);
  report_stages(group, samples.steps, steps.in_flight(), report);
  report_floor(group, samples, floor, report);
  const int blocks = (job.steps + kBlock - 1) / kBlock;  // each took one step more
  report_traffic(group, before, after, (job.steps + blocks) * steps.in_flight(), report);
  group.barrier();  // nobody unmaps what a peer still uses
  return report;
}

}  // namespace wherry::bench
