#include "results.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <utility>

#include "link.hpp"
#include "wherry/group.hpp"

namespace wherry::bench {

namespace {

using Json = nlohmann::ordered_json;

float at_share(std::vector<float> values, double share) {
  std::ranges::sort(values);
  if (values.empty()) return 0.0F;
  return values[static_cast<std::size_t>(static_cast<double>(values.size() - 1) * share)];
}

double rounded(double value, int digits) {
  const double scale = std::pow(10.0, digits);
  return std::round(value * scale) / scale;
}

void add_line(const std::string& path, const Json& line) {
  std::ofstream(path, std::ios::app) << line.dump() << '\n';
}

std::string variable(const char* name) {
  const char* const value = std::getenv(name);
  return value != nullptr ? value : "unknown";
}

}  // namespace

Results::Results(std::string path, std::string command)
    : path_(std::move(path)),
      command_(std::move(command)) {
  std::ofstream(rows_path(), std::ios::trunc);
}

void Results::finish() const {
  const Json head{
      {"machine", variable("WHERRY_MACHINE")}, {"driver", variable("WHERRY_DRIVER")},
      {"cuda", variable("WHERRY_NVCC")},       {"compiler", variable("WHERRY_COMPILER")},
      {"commit", variable("WHERRY_COMMIT")},   {"command", command_}};
  std::string text = head.dump();
  text.pop_back();
  std::ofstream file(path_, std::ios::trunc);
  file << text << ",\n \"results\": [";
  std::ifstream rows(rows_path());
  bool first = true;
  for (std::string row; std::getline(rows, row); first = false) {
    file << (first ? "\n  " : ",\n  ") << row;
  }
  file << "\n]}\n";
  std::filesystem::remove(rows_path());
}

void Results::measure_the_link() {
  run_processes(1, [this](Group&) { add_link(); });
  std::ifstream rows(rows_path());
  for (std::string row; std::getline(rows, row);) {
    link_gbps_ = Json::parse(row).value("kernel_gbps", link_gbps_);
  }
}

void Results::add_link() const {
  double engine = 0.0;
  const auto add = [this](const Json& line) {
    add_line(rows_path(), line);
    std::puts(line.dump().c_str());
  };
  const std::vector<LinkRate> rates = measure_link();
  for (const LinkRate& rate : rates) {
    if (rate.blocks == 0) engine = rate.both_ways;
    add({{"link", rate.how},
         {"blocks", rate.blocks},
         {"one_way_gbps", rounded(rate.one_way, 1)},
         {"both_ways_gbps", rounded(rate.both_ways, 1)}});
  }
  const RoundTrip trip = measure_round_trip();
  add({{"link", "round trip"},
       {"relaxed_us", rounded(trip.relaxed, 2)},
       {"ordered_us", rounded(trip.ordered, 2)},
       {"kernel_gbps", rounded(best_copy(rates), 1)},
       {"engine_gbps", rounded(engine, 1)}});
}

void Results::add(const Row& row) const {
  if (row.us.empty()) return;
  const auto middle = static_cast<double>(median(row.us));
  const auto p99 = static_cast<double>(at_share(row.us, 0.99));
  const double floor_us = row.bytes / row.gbps / 1e3;
  const double percent = 100.0 * floor_us / middle;
  const GpuShape& s = row.shape;
  add_line(rows_path(), {{"ranks_as", bench::name(row.ranks_as)},
                         {"stage", row.stage},
                         {"layout", wherry::name(s.layout)},
                         {"reduction", wherry::name(s.reduction)},
                         {"sum_at", wherry::name(s.sum_at.value_or(SumAt::home))},
                         {"dispatch_wire", s.e4m3 ? "e4m3_block128" : "bf16"},
                         {"kernels", row.kernels},
                         {"ranks", s.ranks},
                         {"sms", s.num_sms},
                         {"tokens", s.tokens},
                         {"hidden", s.hidden},
                         {"topk", s.topk},
                         {"experts", s.experts},
                         {"median_us", rounded(middle, 2)},
                         {"p99_us", rounded(p99, 2)},
                         {"floor_us", rounded(floor_us, 2)},
                         {"floor_percent", rounded(percent, 1)},
                         {"copy_gbps", static_cast<int>(std::lround(row.gbps))},
                         {"right", true}});
  std::puts(fmt::format("{:<9} {}x{:<2} T{:<4} H{:<4} K{:<2} {:<8} {:<8} {:<6} {:<14} {:8.1f} us  "
                        "{:5.1f}%  p99 {:8.1f}",
                        bench::name(row.ranks_as), s.ranks, s.num_sms, s.tokens, s.hidden, s.topk,
                        wherry::name(s.layout), wherry::name(s.reduction),
                        wherry::name(s.sum_at.value_or(SumAt::home)), row.stage, middle, percent,
                        p99)
                .c_str());
  std::fflush(stdout);
}

}  // namespace wherry::bench
