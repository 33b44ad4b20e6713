// A large block of zeroed memory in huge pages where the system grants them: packed weights are
// gigabytes that are streamed.
#pragma once

#include <cstddef>

namespace wherry::experts {

class Pages {
 public:
  // Throws out_of_memory with `what` in the message. 0 bytes are legal.
  Pages(std::size_t bytes, const char* what);
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;
  ~Pages();

  [[nodiscard]] std::byte* data() const noexcept { return data_; }
  [[nodiscard]] std::size_t size() const noexcept { return bytes_; }

 private:
  std::byte* data_ = nullptr;  // aligned to a huge page
  std::size_t bytes_ = 0;
  void* mapping_ = nullptr;
  std::size_t mapping_bytes_ = 0;
};

}  // namespace wherry::experts
