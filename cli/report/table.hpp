// Columns for people: as wide as their widest cell.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace wherry::cli {

class Table {
 public:
  enum class Align : std::uint8_t { left, right };
  struct Column {
    std::string title;  // all empty: no line of titles
    Align align = Align::left;
  };

  explicit Table(std::vector<Column> columns) : columns_(std::move(columns)) {}
  // Missing cells are empty. The last column may be any text: it is not padded.
  void add(std::vector<std::string> cells);
  // Every line begins with `indent` spaces and ends with a newline.
  [[nodiscard]] std::string to_string(int indent = 0) const;

 private:
  std::vector<Column> columns_;
  std::vector<std::vector<std::string>> rows_;
};

// "1.53 GB", "22.0 MB", "17 B": powers of 1000, three digits.
[[nodiscard]] std::string bytes_text(double bytes);
// "812 ns", "3.07 us", "12.4 ms", "1.02 s", three digits.
[[nodiscard]] std::string time_text(double microseconds);
// 1234567 -> "1 234 567"
[[nodiscard]] std::string count_text(std::int64_t count);

}  // namespace wherry::cli
