// Tensors, element types and routing: the plain data that every stage passes on. Nothing here owns
// memory or talks to another rank.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace wherry {

// Element types of rows in the caller's memory. `raw` is one opaque byte: such rows can be
// dispatched (bits move unchanged) but not summed.
enum class DType : std::uint8_t { bf16, f16, f32, f64, raw };

[[nodiscard]] constexpr std::int64_t dtype_bytes(DType dtype) noexcept {
  switch (dtype) {
    case DType::bf16:
    case DType::f16: return 2;
    case DType::f32: return 4;
    case DType::f64: return 8;
    case DType::raw: return 1;
  }
  return 0;
}
[[nodiscard]] std::string_view name(DType dtype) noexcept;

// Where the rows of an exchange are and its kernels run.
struct Device {
  enum class Kind : std::uint8_t { cpu, cuda };
  Kind kind = Kind::cpu;
  int ordinal = 0;  // of a GPU, as this process counts them

  [[nodiscard]] static constexpr Device cpu() noexcept { return {}; }
  [[nodiscard]] static constexpr Device cuda(int ordinal = 0) noexcept {
    return {Kind::cuda, ordinal};
  }
  [[nodiscard]] bool operator==(const Device&) const = default;
};
[[nodiscard]] std::string_view name(Device::Kind kind) noexcept;

// A matrix in the caller's memory or in a window: `rows` rows of `cols` elements, `pitch_bytes`
// from one row to the next (0 means tightly packed). Non-owning; host memory unless said otherwise.
template <typename Pointer>
struct BasicTensorView {
  Pointer data = nullptr;
  DType dtype = DType::bf16;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  std::int64_t pitch_bytes = 0;

  [[nodiscard]] constexpr std::int64_t row_bytes() const noexcept {
    return cols * dtype_bytes(dtype);
  }
  [[nodiscard]] constexpr std::int64_t pitch() const noexcept {
    return pitch_bytes != 0 ? pitch_bytes : row_bytes();
  }
};

struct TensorView : BasicTensorView<void*> {
  // Pointer to row i, as an element pointer of type T.
  template <typename T = std::byte>
  [[nodiscard]] T* row(std::int64_t i) const noexcept {
    return reinterpret_cast<T*>(static_cast<std::byte*>(data) + i * pitch());
  }
};

struct ConstTensorView : BasicTensorView<const void*> {
  ConstTensorView() = default;
  ConstTensorView(const void* data_in, DType dtype_in, std::int64_t rows_in, std::int64_t cols_in,
                  std::int64_t pitch_bytes_in = 0)
      : BasicTensorView{data_in, dtype_in, rows_in, cols_in, pitch_bytes_in} {}
  // A view to write through is also a view to read through.
  ConstTensorView(const TensorView& view)  // NOLINT(google-explicit-constructor)
      : BasicTensorView{view.data, view.dtype, view.rows, view.cols, view.pitch_bytes} {}

  template <typename T = std::byte>
  [[nodiscard]] const T* row(std::int64_t i) const noexcept {
    return reinterpret_cast<const T*>(static_cast<const std::byte*>(data) + i * pitch());
  }
};

// Where tokens go: for token t and choice k, `ids[t*topk + k]` is a logical expert in
// [0, experts) or -1 ("no expert": no traffic, weight ignored), and `weights[t*topk + k]` its fp32
// weight (weights may be null: all 1). The same expert may appear twice in a row; both weights
// count. Non-owning.
struct Routing {
  const void* ids = nullptr;  // int32 or int64, [tokens, topk], row-major
  const float* weights = nullptr;
  std::int64_t tokens = 0;
  int topk = 0;
  bool ids_are_int64 = false;

  Routing() = default;
  Routing(const std::int32_t* ids_in, const float* weights_in, std::int64_t tokens_in, int topk_in)
      : ids(ids_in),
        weights(weights_in),
        tokens(tokens_in),
        topk(topk_in) {}
  Routing(const std::int64_t* ids_in, const float* weights_in, std::int64_t tokens_in, int topk_in)
      : ids(ids_in),
        weights(weights_in),
        tokens(tokens_in),
        topk(topk_in),
        ids_are_int64(true) {}

  [[nodiscard]] std::int64_t id(std::int64_t token, int k) const noexcept {
    const std::int64_t at = token * topk + k;
    return ids_are_int64 ? static_cast<const std::int64_t*>(ids)[at]
                         : static_cast<const std::int32_t*>(ids)[at];
  }
  [[nodiscard]] float weight(std::int64_t token, int k) const noexcept {
    return weights != nullptr ? weights[token * topk + k] : 1.0F;
  }
};

}  // namespace wherry
