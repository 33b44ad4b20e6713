// Over what a contract is tested: every legal layout and reduction, both fabrics, these numbers of
// ranks, the reference kernels and the best ones. `make test` takes a set of settings in which every
// pair of values meets; with WHERRY_FULL_MATRIX (make test-all) it is all of them.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "kernels/stages.hpp"
#include "support/layer.hpp"

namespace wherry::test {

struct Setting {
  LegalPair form;
  bool processes;  // the shm fabric, else the process fabric
  int ranks;
  std::string kernels;

  [[nodiscard]] std::string text() const {
    return fmt::format("{} {}{} over {} {}, kernels {}", name(form.layout), name(form.reduction),
                       form.sum_at == SumAt::expert ? " (summed by experts)" : "", ranks,
                       processes ? "processes" : "threads", kernels);
  }
  [[nodiscard]] ExchangeConfig config(const Batch& batch) const {
    ExchangeConfig config = config_for(batch);
    config.layout = form.layout;
    config.reduction = form.reduction;
    config.sum_at = form.sum_at;
    config.kernels = kernels;
    return config;
  }
  // Rethrows what comes first on any rank.
  void run(const std::function<void(Group&)>& rank) const {
    processes ? run_processes(ranks, rank) : run_threads(ranks, rank);
  }
};

inline std::vector<Setting> every_setting(const std::vector<int>& ranks) {
  std::vector<Setting> all;
  for (const LegalPair& form : kLegalPairs) {
    for (const bool processes : {false, true}) {
      for (const int n : ranks) {
        std::set<std::string> kernels{"reference", std::string(kernels::available()[0].name)};
        for (const std::string& set : kernels) all.push_back({form, processes, n, set});
      }
    }
  }
  return all;
}

// Greedily the setting that meets most new pairs of values, until all pairs have met.
inline std::vector<Setting> pairwise(const std::vector<Setting>& all) {
  using Value = std::pair<int, std::string>;
  const auto pairs_of = [](const Setting& s) {
    const std::array<Value, 4> values{
        Value{0, fmt::format("{} {} {}", name(s.form.layout), name(s.form.reduction),
                             name(s.form.sum_at))},
        {1, s.processes ? "processes" : "threads"},
        {2, fmt::to_string(s.ranks)},
        {3, s.kernels}};
    std::set<std::pair<Value, Value>> pairs;
    for (std::size_t i = 0; i < values.size(); ++i) {
      for (std::size_t j = i + 1; j < values.size(); ++j) pairs.emplace(values[i], values[j]);
    }
    return pairs;
  };
  std::set<std::pair<Value, Value>> open;
  for (const Setting& s : all) open.merge(pairs_of(s));
  std::vector<Setting> chosen;
  while (!open.empty()) {
    const Setting* best = nullptr;
    std::size_t most = 0;
    for (const Setting& s : all) {
      std::size_t met = 0;
      for (const auto& pair : pairs_of(s)) met += open.count(pair);
      if (met > most) {
        most = met;
        best = &s;
      }
    }
    for (const auto& pair : pairs_of(*best)) open.erase(pair);
    chosen.push_back(*best);
  }
  return chosen;
}

#ifndef WHERRY_SANITIZED
#define WHERRY_SANITIZED ""
#endif
#ifndef WHERRY_FULL_MATRIX
#define WHERRY_FULL_MATRIX 0
#endif

inline std::vector<Setting> settings(std::vector<int> ranks = {1, 2, 3, 4, 7}) {
  constexpr std::string_view kSanitized = WHERRY_SANITIZED;
  if (!kSanitized.empty()) ranks = {ranks.front(), ranks.back()};  // it is slow
  std::vector<Setting> all = every_setting(ranks);
  if (WHERRY_FULL_MATRIX == 0) all = pairwise(all);
  if (kSanitized == "thread") {  // it follows no fork
    std::erase_if(all, [](const Setting& s) { return s.processes; });
  }
  return all;
}

// Runs `contract(setting)` in every setting; what it throws fails the test, which says where.
template <typename Contract>
void in_every_setting(const std::vector<Setting>& all, Contract contract) {
  for (const Setting& setting : all) {
    SCOPED_TRACE(setting.text());
    EXPECT_NO_THROW(contract(setting));
    if (::testing::Test::HasFailure()) return;  // one is enough to read
  }
}

// Runs the same step on all ranks, which must fail everywhere with this code. `rank` throws the
// error; returns nothing where it was expected and an exception where it was not.
template <typename Step>
void expect_error(ErrorCode code, const std::string& part, Step step) {
  try {
    step();
  } catch (const Error& error) {
    expect(error.code() == code, fmt::format("{}: not {}", error.what(), name(code)));
    expect(std::string(error.what()).find(part) != std::string::npos,
           fmt::format("'{}' does not say '{}'", error.what(), part));
    return;
  }
  expect(false, fmt::format("nothing was thrown; expected {}: {}", name(code), part));
}

}  // namespace wherry::test
