// What a command prints: one JSON object with --json, else text for people. Nothing else goes to
// stdout.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace wherry::cli {

using Json = nlohmann::ordered_json;  // fields stay in the order in which they are written

// {"command": ..., "version": ..., "commit": ...}: how every object begins.
[[nodiscard]] Json json_for(std::string_view command);

// Writes all of `text` to stdout. Throws Error(system) if not every byte could be written.
void print_text(std::string_view text);
// The object on one line.
void print_json(const Json& object);

}  // namespace wherry::cli
