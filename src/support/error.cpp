#include "wherry/error.hpp"

#include <fmt/format.h>

namespace wherry {

Remedy remedy(ErrorCode code) noexcept {
  switch (code) {
    case ErrorCode::bad_argument:
    case ErrorCode::config_mismatch:
    case ErrorCode::bad_routing:
    case ErrorCode::capacity:
    case ErrorCode::misuse:
    case ErrorCode::unsupported: return Remedy::fix_the_call;
    case ErrorCode::timeout:
    case ErrorCode::fault:
    case ErrorCode::out_of_memory:
    case ErrorCode::system:
    case ErrorCode::interrupted: return Remedy::rebuild_the_exchange;
    case ErrorCode::peer_failed: return Remedy::replace_the_peer;
    case ErrorCode::internal: return Remedy::bug_in_wherry;
  }
  return Remedy::bug_in_wherry;
}

std::string_view name(ErrorCode code) noexcept {
  switch (code) {
    case ErrorCode::bad_argument: return "bad_argument";
    case ErrorCode::config_mismatch: return "config_mismatch";
    case ErrorCode::bad_routing: return "bad_routing";
    case ErrorCode::capacity: return "capacity";
    case ErrorCode::misuse: return "misuse";
    case ErrorCode::unsupported: return "unsupported";
    case ErrorCode::timeout: return "timeout";
    case ErrorCode::fault: return "fault";
    case ErrorCode::out_of_memory: return "out_of_memory";
    case ErrorCode::system: return "system";
    case ErrorCode::interrupted: return "interrupted";
    case ErrorCode::peer_failed: return "peer_failed";
    case ErrorCode::internal: return "internal";
  }
  return "internal";
}

std::string_view name(Remedy remedy) noexcept {
  switch (remedy) {
    case Remedy::fix_the_call: return "fix the call";
    case Remedy::rebuild_the_exchange: return "rebuild the exchange";
    case Remedy::replace_the_peer: return "replace the peer";
    case Remedy::bug_in_wherry: return "bug in wherry";
  }
  return "bug in wherry";
}

std::string_view name(Stage stage) noexcept {
  switch (stage) {
    case Stage::none: return "none";
    case Stage::startup: return "startup";
    case Stage::group: return "group";
    case Stage::route: return "route";
    case Stage::plan: return "plan";
    case Stage::dispatch_send: return "dispatch_send";
    case Stage::dispatch_recv: return "dispatch_recv";
    case Stage::experts: return "experts";
    case Stage::combine_send: return "combine_send";
    case Stage::combine_recv: return "combine_recv";
    case Stage::release: return "release";
    case Stage::format: return "format";
    case Stage::placement: return "placement";
  }
  return "none";
}

namespace {

std::string sentence(ErrorCode code, const Error::Where& where, const std::string& message) {
  std::string prefix = fmt::format("wherry: {}", name(code));
  if (where.stage != Stage::none) prefix += fmt::format(" in {}", name(where.stage));
  if (where.rank >= 0) prefix += fmt::format(", rank {}", where.rank);
  if (where.peer >= 0) prefix += fmt::format(", peer {}", where.peer);
  return fmt::format("{}: {}", prefix, message);
}

}  // namespace

Error::Error(ErrorCode code, Where where, const std::string& message)
    : std::runtime_error(sentence(code, where, message)),
      code_(code),
      where_(where),
      message_(message) {}

}  // namespace wherry
