// A large block of zeroed memory in huge pages where the system grants them: packed weights are
// gigabytes that are streamed.
#pragma once

#include <cstddef>
#include <utility>

namespace wherry::experts {

class Pages {
 public:
  Pages() = default;
  // Throws out_of_memory with `what` in the message. 0 bytes are legal.
  Pages(std::size_t bytes, const char* what);
  Pages(Pages&& other) noexcept { swap(other); }
  Pages& operator=(Pages&& other) noexcept {
    swap(other);
    return *this;
  }
  ~Pages();

  [[nodiscard]] std::byte* data() const noexcept { return data_; }
  [[nodiscard]] std::size_t size() const noexcept { return bytes_; }

 private:
  void swap(Pages& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(mapping_, other.mapping_);
    std::swap(mapping_bytes_, other.mapping_bytes_);
  }

  std::byte* data_ = nullptr;  // aligned to a huge page
  std::size_t bytes_ = 0;
  void* mapping_ = nullptr;
  std::size_t mapping_bytes_ = 0;
};

}  // namespace wherry::experts
