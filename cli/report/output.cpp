#include "report/output.hpp"

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "support/build_info.hpp"
#include "support/check.hpp"

namespace wherry::cli {

Json json_for(std::string_view command) {
  Json object;
  object["command"] = command;
  object["version"] = build_info::kVersion;
  object["commit"] = build_info::git_commit();
  return object;
}

void print_text(std::string_view text) {
  const bool written = std::fwrite(text.data(), 1, text.size(), stdout) == text.size();
  WHERRY_CHECK(written && std::fflush(stdout) == 0, ErrorCode::system,
               (Error::Where{Stage::none, -1, -1}), "stdout could not be written: {}",
               std::strerror(errno));
}

void print_json(const Json& object) { print_text(object.dump() + "\n"); }

}  // namespace wherry::cli
