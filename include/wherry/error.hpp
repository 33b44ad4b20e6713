// What can go wrong, in one type. Codes are grouped by what the caller can do about them.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

namespace wherry {

// The stages of the data flow, in order. The same words name headers, kernel files, counters and
// documentation. `startup` is everything before the first plan; `group` a collective of the group.
enum class Stage : std::uint8_t {
  none,
  startup,
  group,
  route,
  plan,
  dispatch_send,
  dispatch_recv,
  experts,
  combine_send,
  combine_recv,
  release,
  format,
  placement,
};

enum class ErrorCode : std::uint8_t {
  // fix the call
  bad_argument,     // a value outside what is allowed; the message says what is
  config_mismatch,  // ranks were constructed with different configurations
  bad_routing,      // an expert id outside [-1, experts), found in the data
  capacity,         // more rows than `receive_rows` under Overflow::error
  misuse,           // a legal call at the wrong time (order of halves, foreign plan, depth)
  unsupported,      // this build or machine cannot do it; the message says why
  // rebuild the exchange
  timeout,        // a wait ran past its deadline
  fault,          // another rank reported a fault; the message carries the first cause
  out_of_memory,  // a window, plan or weight did not fit
  system,         // the operating system refused; errno is in the message
  interrupted,    // the caller asked to stop
  // replace the peer
  peer_failed,  // a peer died
  // bug in wherry
  internal,
};

enum class Remedy : std::uint8_t {
  fix_the_call,
  rebuild_the_exchange,
  replace_the_peer,
  bug_in_wherry
};

[[nodiscard]] Remedy remedy(ErrorCode code) noexcept;
[[nodiscard]] std::string_view name(ErrorCode code) noexcept;
[[nodiscard]] std::string_view name(Remedy remedy) noexcept;
[[nodiscard]] std::string_view name(Stage stage) noexcept;

// The only exception type the library throws. `what()` is a whole sentence that already contains
// the code, stage, rank and peer. rank and peer are -1 where they mean nothing.
class Error : public std::runtime_error {
 public:
  struct Where {
    Stage stage = Stage::none;
    int rank = -1;
    int peer = -1;
  };

  Error(ErrorCode code, Where where, const std::string& message);

  [[nodiscard]] ErrorCode code() const noexcept { return code_; }
  [[nodiscard]] Remedy remedy() const noexcept { return wherry::remedy(code_); }
  [[nodiscard]] Stage stage() const noexcept { return where_.stage; }
  [[nodiscard]] int rank() const noexcept { return where_.rank; }
  [[nodiscard]] int peer() const noexcept { return where_.peer; }
  // The message alone, without the prefix that what() puts before it.
  [[nodiscard]] const std::string& message() const noexcept { return message_; }

 private:
  ErrorCode code_;
  Where where_;
  std::string message_;
};

}  // namespace wherry
