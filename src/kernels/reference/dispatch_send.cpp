// dispatch_send: every row of x to its places in the windows of the ranks that hold its experts.
#include "kernels/send_rows.hpp"

#include "kernels/reference/reference.hpp"

namespace wherry::kernels::reference {

Moved dispatch_send(const DispatchSend& a, std::int64_t begin, std::int64_t end) {
  const auto copy_row = [](std::byte* to, const std::byte* from, std::int64_t bytes) {
    std::memcpy(to, from, static_cast<std::size_t>(bytes));
  };
  return send_rows(a, begin, end, quantize_row, copy_row);
}

}  // namespace wherry::kernels::reference
