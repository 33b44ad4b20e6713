#include <algorithm>
#include <span>

#include "support/delays.hpp"
#include "support/random_case.hpp"

namespace wherry::test {

namespace {

// One rank's side of a case.
template <typename T>
class Runner {
 public:
  Runner(Group& group, const RandomCase& r)
      : r_(r),
        exchange_(group, r.config),
        home_(home_of(exchange_)),
        tokens_(r.batch.tokens_of(home_)),
        first_(r.batch.token_begin[static_cast<std::size_t>(home_)]),
        x_(tokens_of<T>(r.batch, home_)) {
    scalars_.assign(r.batch.weights.begin() + first_ * r.batch.topk,
                    r.batch.weights.begin() + (first_ + tokens_) * r.batch.topk);
  }

  void run() {
    Plan plan = exchange_.make_plan();
    Plan other = exchange_.make_plan();
    for (const RandomCase::Step& step : r_.steps) {
      if (step.replan) fill(plan, step.shift);
      if (step.use == RandomCase::Use::overlapping) {
        fill(other, step.shift + 1);
        overlap(plan, other);
        continue;
      }
      auto flight = begin(plan);
      arrive(flight);
      if (step.use == RandomCase::Use::released) exchange_.release(flight.received);
      if (step.use != RandomCase::Use::paired) continue;
      expert(flight);
      auto home = combine(flight);
      home.finish();
      verify(flight);
    }
  }

 private:
  struct Flight {
    const Plan* plan;
    Exchange::DispatchHandle handle;
    Received received;
    std::vector<T> rows, y, out;
    std::vector<float> scalars_home;
    TensorView results;
  };

  [[nodiscard]] std::int64_t hidden() const { return r_.batch.hidden; }
  [[nodiscard]] int expert_of(int slot) const {
    return exchange_.placement().slot_to_expert()[static_cast<std::size_t>(slot)];
  }

  void fill(Plan& plan, int shift) {
    const Placement& placement = exchange_.placement();
    std::vector<std::int32_t> ids;
    for (std::int64_t i = first_ * r_.batch.topk; i < (first_ + tokens_) * r_.batch.topk; ++i) {
      int id = r_.batch.ids[static_cast<std::size_t>(i)];
      if (id >= 0) id = (id + shift) % r_.batch.experts;
      if (id >= 0 && r_.config.expert_ids == ExpertIds::physical) {
        const auto slots = placement.slots_of(id);
        id = slots[static_cast<std::size_t>(i) % slots.size()];
      }
      ids.push_back(id);
    }
    const std::vector<std::int64_t> wide(ids.begin(), ids.end());
    const float* const weights = r_.batch.weights.data() + first_ * r_.batch.topk;
    exchange_.plan(r_.wide_ids ? Routing(wide.data(), weights, tokens_, r_.batch.topk)
                               : Routing(ids.data(), weights, tokens_, r_.batch.topk),
                   plan);
    const PlanData& data = plan.to_host();
    for (std::size_t i = 0; i < ids.size(); ++i) {
      const int slot = data.slot[i];
      const bool right = ids[i] < 0 ? slot == -1
                         : r_.config.expert_ids == ExpertIds::physical
                             ? slot == ids[i]
                             : slot >= 0 && expert_of(slot) == ids[i];
      expect(right, fmt::format("choice {} of id {} goes to slot {}", i, ids[i], slot));
    }
  }

  Flight begin(const Plan& plan) {
    Flight f;
    f.plan = &plan;
    DispatchOptions options;
    const PlanData& data = plan.to_host();
    const std::int64_t rows =
        r_.config.layout == Layout::tokens ? data.token_rows_received : data.slot_begin.back();
    if (r_.copied_rows || r_.config.dispatch_wire != Wire::same) {
      f.rows.resize(static_cast<std::size_t>(rows * hidden()));
      options.out = view(f.rows, hidden());
    }
    if (r_.scalars) options.row_scalars = scalars_.data();
    f.handle = exchange_.dispatch_begin(plan, view(x_, hidden()), options);
    return f;
  }

  void arrive(Flight& f) { f.received = f.handle.finish(); }

  void expert(Flight& f) {
    f.y.resize(static_cast<std::size_t>(f.received.rows.rows * hidden()));
    f.results = r_.own_memory ? view(f.y, hidden()) : exchange_.combine_input(*f.plan);
    if (f.received.rows.rows > 0) apply_experts<T>(exchange_, f.received, f.results);
  }

  Exchange::CombineHandle combine(Flight& f) {
    const auto home_elements = static_cast<std::size_t>(f.plan->home_tokens() * hidden());
    f.out.resize(home_elements);
    CombineOptions options;
    addend_.assign(home_elements, Codec<T>::store(static_cast<typename Codec<T>::Sum>(0.375)));
    if (r_.addend) options.addend = view(addend_, hidden());
    if (r_.scalars) {
      f.scalars_home.resize(static_cast<std::size_t>(f.plan->home_tokens() * r_.batch.topk));
      options.row_scalars = f.received.row_scalars.data();
      options.scalars_out = f.scalars_home.data();
    }
    return exchange_.combine_begin(*f.plan, f.results, view(f.out, hidden()), options);
  }

  // Two steps in flight, finished in another order than they began.
  void overlap(const Plan& plan_a, const Plan& plan_b) {
    Flight a = begin(plan_a);
    Flight b = begin(plan_b);
    arrive(b);
    arrive(a);
    expert(b);
    auto home_b = combine(b);
    expert(a);
    auto home_a = combine(a);
    home_a.finish();
    verify(a);
    home_b.finish();
    verify(b);
  }

  void verify(const Flight& f) const {
    const PlanData& data = f.plan->to_host();
    const auto [begin, end] = home_range(exchange_, r_.batch);
    expect(f.plan->home_tokens() == end - begin, "home_tokens()");
    for (std::int64_t t = begin; t < end; ++t) {
      const auto choices =
          choices_of(r_.config, data, t, [&](int slot) { return expert_of(slot); });
      const std::span addend = r_.addend
                                   ? std::span(addend_).first(static_cast<std::size_t>(hidden()))
                                   : std::span<const T>{};
      const std::vector<T> want =
          Expected<T>(r_.config, row_of<T>(r_.batch, first_ + t)).sums(choices, addend);
      const std::span got(f.out.data() + (t - begin) * hidden(), want.size());
      expect(std::ranges::equal(std::as_bytes(std::span(want)), std::as_bytes(got)),
             fmt::format("rank {}, token {}: the sum is wrong", exchange_.rank(), t));
      if (r_.scalars) verify_scalars(f, t, t - begin);
    }
  }

  // The scalar of a row is the sum of the scalars of the choices that it serves.
  void verify_scalars(const Flight& f, std::int64_t token, std::int64_t home) const {
    const PlanData& data = f.plan->to_host();
    for (int k = 0; k < r_.batch.topk; ++k) {
      const auto at = static_cast<std::size_t>(token * r_.batch.topk + k);
      float want = 0.0F;
      for (int other = 0; data.row[at] >= 0 && other < r_.batch.topk; ++other) {
        const auto same = static_cast<std::size_t>(token * r_.batch.topk + other);
        if (data.slot[same] == data.slot[at]) want += scalars_[same];
      }
      const float got = f.scalars_home[static_cast<std::size_t>(home * r_.batch.topk + k)];
      expect(got == want, fmt::format("rank {}, token {}, choice {}: scalar {} came home as {}",
                                      exchange_.rank(), token, k, want, got));
    }
  }

  const RandomCase& r_;
  Exchange exchange_;
  int home_;
  std::int64_t tokens_, first_;
  std::vector<T> x_;
  std::vector<T> addend_;
  std::vector<float> scalars_;
};

void run_rank(Group& group, const RandomCase& r) {
  if (r.delays) delay_signals(group, r.config);
  switch (r.config.dtype) {
    case DType::bf16: return Runner<Bf16>(group, r).run();
    case DType::f16: return Runner<_Float16>(group, r).run();
    case DType::f32: return Runner<float>(group, r).run();
    case DType::f64: return Runner<double>(group, r).run();
    case DType::raw: break;
  }
}

}  // namespace

void run_case(const RandomCase& r) {
  const auto rank = [&](Group& group) { run_rank(group, r); };
  r.processes ? run_processes(r.ranks, rank) : run_threads(r.ranks, rank);
}

}  // namespace wherry::test
