// Numbers from a fuzzer's bytes: one byte where the range fits, else eight; least when they are used up,
// so that every input is a case.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace wherry::test {

class Bytes {
 public:
  explicit Bytes(std::span<const std::uint8_t> data) : data_(data) {}

  [[nodiscard]] std::int64_t between(std::int64_t least, std::int64_t most) {
    const std::uint64_t width =
        static_cast<std::uint64_t>(most) - static_cast<std::uint64_t>(least) + 1;
    const bool narrow = width != 0 && width <= 256;  // 0: all of 64 bits
    const std::uint64_t value = narrow ? take<std::uint8_t>() : take<std::uint64_t>();
    const std::uint64_t inside = width == 0 ? value : value % width;
    return static_cast<std::int64_t>(static_cast<std::uint64_t>(least) + inside);
  }

  template <typename T>
  [[nodiscard]] T take() {
    T value{};
    const std::size_t size = std::min(sizeof(T), data_.size());
    if (size > 0) std::memcpy(&value, data_.data(), size);
    data_ = data_.subspan(size);
    return value;
  }

 private:
  std::span<const std::uint8_t> data_;
};

// What each fuzzer does with one input; throws where something is wrong (entry.cpp).
void run(Bytes bytes);

}  // namespace wherry::test
