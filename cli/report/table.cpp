#include "report/table.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

namespace wherry::cli {

namespace {

// Three significant digits of a value in [0, 1000), without an exponent.
std::string three_digits(double value, const char* unit) {
  const int decimals = value < 9.995 ? 2 : value < 99.95 ? 1 : 0;
  return fmt::format("{:.{}f} {}", value, decimals, unit);
}

}  // namespace

void Table::add(std::vector<std::string> cells) {
  cells.resize(columns_.size());
  rows_.push_back(std::move(cells));
}

std::string Table::to_string(int indent) const {
  std::vector<std::vector<std::string>> lines;
  std::vector<std::string> titles;
  titles.reserve(columns_.size());
  for (const Column& column : columns_) titles.push_back(column.title);
  if (std::ranges::any_of(titles, [](const auto& title) { return !title.empty(); })) {
    lines.push_back(titles);
  }
  lines.insert(lines.end(), rows_.begin(), rows_.end());

  std::string text;
  for (const auto& line : lines) {
    std::string out(static_cast<std::size_t>(indent), ' ');
    for (std::size_t c = 0; c < columns_.size(); ++c) {
      std::size_t width = 0;
      for (const auto& other : lines) width = std::max(width, other[c].size());
      if (c > 0) out += "  ";
      out += columns_[c].align == Align::left ? fmt::format("{:<{}}", line[c], width)
                                              : fmt::format("{:>{}}", line[c], width);
    }
    out.erase(out.find_last_not_of(' ') + 1);
    text += out + "\n";
  }
  return text;
}

std::string bytes_text(double bytes) {
  if (bytes < 1000.0) return fmt::format("{:.0f} B", bytes);
  constexpr const char* kUnits[] = {"kB", "MB", "GB", "TB", "PB", "EB"};
  std::size_t unit = 0;
  for (bytes /= 1000.0; bytes >= 999.5 && unit + 1 < std::size(kUnits); ++unit) bytes /= 1000.0;
  return three_digits(bytes, kUnits[unit]);
}

std::string time_text(double microseconds) {
  if (microseconds < 0.9995) return three_digits(microseconds * 1e3, "ns");
  if (microseconds < 999.5) return three_digits(microseconds, "us");
  if (microseconds < 999.5e3) return three_digits(microseconds / 1e3, "ms");
  return fmt::format("{:.2f} s", microseconds / 1e6);
}

std::string count_text(std::int64_t count) {
  const std::string digits = fmt::format("{}", count);
  std::string text;
  for (std::size_t at = 0; at < digits.size(); ++at) {
    const bool starts_group = at > 0 && (digits.size() - at) % 3 == 0 && digits[at - 1] != '-';
    if (starts_group) text += ' ';
    text += digits[at];
  }
  return text;
}

}  // namespace wherry::cli
