// One line on stderr that says what long work is doing; only on a terminal.
#pragma once

#include <chrono>
#include <string_view>

namespace wherry::cli {

class Progress {
 public:
  // Shows nothing unless `shown` and stderr is a terminal.
  explicit Progress(bool shown);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // Replaces the line.
  void show(std::string_view text);
  // The same, but skipped if the line changed less than 50 ms ago: for loops.
  void tick(std::string_view text);

 private:
  bool shown_;
  std::chrono::steady_clock::time_point last_{};
};

// For a launcher whose rank died with its line still there.
void clear_progress();

}  // namespace wherry::cli
