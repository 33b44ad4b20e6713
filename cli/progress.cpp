#include "progress.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <cstdio>

namespace wherry::cli {

Progress::Progress(bool shown) : shown_(shown && isatty(STDERR_FILENO) != 0) {}

Progress::~Progress() {
  if (shown_) clear_progress();
}

void Progress::show(std::string_view text) {
  if (!shown_) return;
  fmt::print(stderr, "\r\033[K{}", text);
  std::fflush(stderr);
  last_ = std::chrono::steady_clock::now();
}

void Progress::tick(std::string_view text) {
  if (std::chrono::steady_clock::now() - last_ >= std::chrono::milliseconds(50)) show(text);
}

void clear_progress() {
  if (isatty(STDERR_FILENO) != 0) fmt::print(stderr, "\r\033[K");
}

}  // namespace wherry::cli
