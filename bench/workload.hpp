// What the benchmarks move: tokens, routing and the dense reference of both. Shared by `wherry bench`
// and the MPI baseline, so that both do the same work; needs neither of them nor the library.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

namespace wherry::bench {

// The global problem: `tokens` a rank, experts in equal contiguous shares as far as they divide.
struct Shape {
  int ranks = 4;
  std::int64_t tokens = 512;  // a rank
  std::int64_t hidden = 4096;
  int topk = 8;
  int experts = 64;
  unsigned seed = 1;

  [[nodiscard]] std::int64_t row_bytes() const noexcept { return hidden * 2; }  // bf16
  // The first (experts % ranks) ranks hold one expert more than the others.
  [[nodiscard]] int rank_of(int expert) const noexcept;
};

// Rows of bf16 on cache lines of their own: every row starts on a multiple of 64 bytes.
class Rows {
 public:
  Rows() = default;
  Rows(std::int64_t rows, std::int64_t row_bytes);

  [[nodiscard]] std::int64_t rows() const noexcept { return rows_; }
  [[nodiscard]] std::int64_t pitch() const noexcept { return pitch_; }
  [[nodiscard]] std::byte* data() const noexcept { return memory_.get(); }
  template <typename T = std::uint16_t>
  [[nodiscard]] T* row(std::int64_t at) const noexcept {
    return reinterpret_cast<T*>(memory_.get() + at * pitch_);
  }
  void fill(int byte);

 private:
  struct Free {
    void operator()(std::byte* memory) const noexcept { std::free(memory); }
  };
  std::int64_t rows_ = 0;
  std::int64_t pitch_ = 0;
  std::unique_ptr<std::byte, Free> memory_;
};

// One rank's share: x [tokens, hidden] in bf16, values of both signs below 2; topk distinct experts
// a token, all equally likely; weights that differ and do not sum to 1. A weight has at most 11 bits
// and a bf16 value 8, so their product is exact in fp32: a separate multiplication and addition give
// the bits of a fused one, which spares the experts (not the library) an fma on machines without.
struct Workload {
  Rows x;
  std::vector<std::int32_t> ids;  // [tokens, topk]
  std::vector<float> weights;     // [tokens, topk]
};
[[nodiscard]] Workload make_workload(const Shape& shape, int rank);

// What the experts do to a row of slot s (here slot and expert are the same number).
enum class Experts : std::uint8_t {
  identity,  // y = x
  scale,     // y = x * (1 + slot/64), rounded to bf16: experts differ, so that a mix-up is seen
};

[[nodiscard]] inline float widen(std::uint16_t bf16) noexcept {
  const std::uint32_t bits = static_cast<std::uint32_t>(bf16) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}
// To nearest, ties to even; finite values only.
[[nodiscard]] inline std::uint16_t narrow(float value) noexcept {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const std::uint32_t truncated = bits >> 16;
  const std::uint32_t rest = bits & 0xFFFFU;
  const bool up = (rest | (truncated & 1U)) > 0x8000U;  // a tie goes up from an odd value only
  return static_cast<std::uint16_t>(truncated + (up ? 1U : 0U));
}
[[nodiscard]] inline std::uint16_t expert_value(Experts experts, int slot,
                                                std::uint16_t x) noexcept {
  if (experts == Experts::identity) return x;
  return narrow(widen(x) * (1.0F + static_cast<float>(slot) / 64.0F));
}

// The dense reference, by the definitions of docs/design.md section 4: fp32 fused multiply-add in k
// order; by_rank rounds the sum of each rank to bf16 and adds those in rank order.
enum class Sum : std::uint8_t { by_token, by_rank };
// What number formats on the way do to a row, for references that have them; empty: nothing.
struct Travel {
  std::function<void(std::vector<std::uint16_t>& x)> out;  // to the experts
  std::function<void(std::vector<float>& row)> home;       // a result, or the sum of a rank
  bool rounds_first = false;  // by_rank: the sum is rounded to bf16 before it goes home
};
[[nodiscard]] std::vector<std::uint16_t> dense_token(const Shape& shape, const Workload& work,
                                                     Experts experts, Sum sum, std::int64_t token,
                                                     const Travel& travel = {});

}  // namespace wherry::bench
