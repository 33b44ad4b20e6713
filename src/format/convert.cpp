// Rows to wire formats and back, one or many at a time: checks, the choice of the kernel, and where
// the scales of a row go in the plane.
#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels/stages.hpp"
#include "kernels/wires.hpp"
#include "support/check.hpp"
#include "wherry/format.hpp"

namespace wherry {

namespace {

const kernels::KernelSet& kernel_set() {
  static const kernels::KernelSet& set = kernels::find({});
  return set;
}

void check_rows(const WireFormat& format, const void* x, DType dtype, std::int64_t rows,
                std::int64_t cols, std::int64_t pitch) {
  WHERRY_CHECK_ARGUMENT(dtype == format.dtype && cols == format.hidden, Stage::format,
                        "x has {} columns of {}; the format is for {} of {}", cols, name(dtype),
                        format.hidden, name(format.dtype));
  WHERRY_CHECK_ARGUMENT(rows >= 0 && (rows == 0 || x != nullptr), Stage::format,
                        "x has {} rows at {}", rows, x);
  const std::int64_t bytes = cols * dtype_bytes(dtype);
  WHERRY_CHECK_ARGUMENT(pitch >= bytes && pitch % dtype_bytes(dtype) == 0, Stage::format,
                        "the pitch of x is {}; allowed: multiples of {} from {}", pitch,
                        dtype_bytes(dtype), bytes);
}

// Returns the pitch of the payload.
template <typename Pointer>
std::int64_t check_wire_rows(const WireFormat& format, const BasicWireRows<Pointer>& wire,
                             std::int64_t rows) {
  const std::int64_t pitch =
      wire.payload_pitch_bytes != 0 ? wire.payload_pitch_bytes : format.payload_pitch();
  WHERRY_CHECK_ARGUMENT(wire.rows == rows, Stage::format,
                        "the converted rows are {}, x has {}; both must be the same", wire.rows,
                        rows);
  WHERRY_CHECK_ARGUMENT(pitch >= format.payload_bytes, Stage::format,
                        "payload_pitch_bytes is {}; {} rows of {} need at least {}", pitch,
                        name(format.wire), format.hidden, format.payload_bytes);
  WHERRY_CHECK_ARGUMENT(rows == 0 || wire.payload != nullptr, Stage::format, "payload is null");
  WHERRY_CHECK_ARGUMENT(rows == 0 || !format.quantised() || wire.scales != nullptr, Stage::format,
                        "scales is null; {} needs {} bytes", name(format.wire),
                        scale_plane_bytes(format, rows));
  return pitch;
}

}  // namespace

void quantize_row(const WireFormat& format, const void* x, void* payload, void* scales) {
  kernel_set().quantize_row(format, static_cast<const std::byte*>(x),
                            static_cast<std::byte*>(payload), static_cast<std::byte*>(scales));
}

void dequantize_row(const WireFormat& format, const void* payload, const void* scales, void* x) {
  kernel_set().dequantize_row(format, static_cast<const std::byte*>(payload),
                              static_cast<const std::byte*>(scales), static_cast<std::byte*>(x));
}

void quantize(const WireFormat& format, ConstTensorView x, const WireRows& out) {
  check_rows(format, x.data, x.dtype, x.rows, x.cols, x.pitch());
  const std::int64_t pitch = check_wire_rows(format, out, x.rows);
  auto* payload = static_cast<std::byte*>(out.payload);
  auto* plane = static_cast<std::byte*>(out.scales);
  if (format.quantised() && x.rows > 0) {
    std::memset(plane, 0, static_cast<std::size_t>(scale_plane_bytes(format, x.rows)));
  }
  std::vector<std::byte> alone(static_cast<std::size_t>(format.scale_bytes));
  for (std::int64_t row = 0; row < x.rows; ++row) {
    quantize_row(format, x.row(row), payload + row * pitch, alone.data());
    kernels::put_scales(format, plane, x.rows, row, alone.data());
  }
}

void dequantize(const WireFormat& format, const ConstWireRows& in, TensorView x) {
  check_rows(format, x.data, x.dtype, x.rows, x.cols, x.pitch());
  const std::int64_t pitch = check_wire_rows(format, in, x.rows);
  const auto* payload = static_cast<const std::byte*>(in.payload);
  const auto* plane = static_cast<const std::byte*>(in.scales);
  std::vector<std::byte> alone(static_cast<std::size_t>(format.scale_bytes));
  for (std::int64_t row = 0; row < x.rows; ++row) {
    kernels::get_scales(format, plane, x.rows, row, alone.data());
    dequantize_row(format, payload + row * pitch, alone.data(), x.row(row));
  }
}

}  // namespace wherry
