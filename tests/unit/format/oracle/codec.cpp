// Converts files, so that a program in another language can compare: the elements of a file one by
// one, or its rows by the public interface. WHERRY_KERNELS pins the kernels.
//
//   format_codec encode  e4m3|e5m2|e2m1|bf16|f16  IN OUT      fp32 to codes
//   format_codec decode  e4m3|e5m2|e2m1|bf16|f16  IN OUT      codes to fp32
//   format_codec quantize    WIRE DTYPE HIDDEN LAYOUT ROWS  X PAYLOAD SCALES
//   format_codec dequantize  WIRE DTYPE HIDDEN LAYOUT ROWS  X PAYLOAD SCALES
//   format_codec kernels                                      names the kernels there are
#include <fmt/format.h>

#include <exception>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/numerics_low.hpp"
#include "kernels/stages.hpp"
#include "wherry/format.hpp"

namespace {

using namespace wherry;

std::vector<char> read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot read " + path);
  return {std::istreambuf_iterator<char>(file), {}};
}
template <typename T>
std::vector<T> read_as(const std::string& path) {
  const std::vector<char> bytes = read(path);
  std::vector<T> values(bytes.size() / sizeof(T));
  std::copy(bytes.begin(), bytes.end(), reinterpret_cast<char*>(values.data()));
  return values;
}
template <typename T>
void write(const std::string& path, const std::vector<T>& values) {
  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char*>(values.data()),
             static_cast<std::streamsize>(values.size() * sizeof(T)));
  if (!file.flush()) throw std::runtime_error("cannot write " + path);
}
template <typename From, typename To>
void map_file(const std::string& in, const std::string& out, To (*fn)(From)) {
  std::vector<To> result;
  for (const From value : read_as<From>(in)) result.push_back(fn(value));
  write(out, result);
}

template <typename Format>
float decode_low(std::uint8_t code) {
  return low_to_float<Format>(code);
}
void encode(std::string_view format, const std::string& in, const std::string& out) {
  if (format == "e4m3") return map_file<float>(in, out, float_to_low<E4M3>);
  if (format == "e5m2") return map_file<float>(in, out, float_to_low<E5M2>);
  if (format == "e2m1") return map_file<float>(in, out, float_to_low<E2M1>);
  if (format == "bf16") return map_file<float>(in, out, float_to_bf16);
  if (format == "f16") return map_file<float>(in, out, float_to_f16);
  throw std::runtime_error("unknown element format");
}
void decode(std::string_view format, const std::string& in, const std::string& out) {
  if (format == "e4m3") return map_file<std::uint8_t>(in, out, decode_low<E4M3>);
  if (format == "e5m2") return map_file<std::uint8_t>(in, out, decode_low<E5M2>);
  if (format == "e2m1") return map_file<std::uint8_t>(in, out, decode_low<E2M1>);
  if (format == "bf16") return map_file<std::uint16_t>(in, out, bf16_to_float);
  if (format == "f16") return map_file<std::uint16_t>(in, out, f16_to_float);
  throw std::runtime_error("unknown element format");
}

template <typename Choices>
auto named(const Choices& choices, std::string_view wanted) {
  for (const auto choice : choices) {
    if (name(choice) == wanted) return choice;
  }
  throw std::runtime_error(fmt::format("unknown name {}", wanted));
}

void rows(bool to_wire, const std::vector<std::string>& args) {
  constexpr DType kDTypes[] = {DType::bf16, DType::f16, DType::f32, DType::f64, DType::raw};
  constexpr ScaleLayout kLayouts[] = {ScaleLayout::row_major, ScaleLayout::column_major,
                                      ScaleLayout::packed_ue8m0};
  const DType dtype = named(kDTypes, args.at(1));
  const WireFormat format = wire_format(wire_named(args.at(0)), dtype, std::stoll(args.at(2)),
                                        named(kLayouts, args.at(3)));
  const std::int64_t count = std::stoll(args.at(4));
  if (to_wire) {
    const std::vector<char> x = read(args.at(5));
    std::vector<char> payload(static_cast<std::size_t>(count * format.payload_bytes));
    std::vector<char> scales(static_cast<std::size_t>(scale_plane_bytes(format, count)));
    quantize(format, {x.data(), dtype, count, format.hidden},
             {payload.data(), scales.data(), count, format.payload_bytes});
    write(args.at(6), payload);
    write(args.at(7), scales);
    return;
  }
  const std::vector<char> payload = read(args.at(6));
  const std::vector<char> scales = read(args.at(7));
  std::vector<char> x(static_cast<std::size_t>(count * format.hidden * dtype_bytes(dtype)));
  TensorView view;
  view.data = x.data();
  view.dtype = dtype;
  view.rows = count;
  view.cols = format.hidden;
  dequantize(format, {payload.data(), scales.data(), count, format.payload_bytes}, view);
  write(args.at(5), x);
}

}  // namespace

int main(int argc, char** argv) try {
  const std::vector<std::string> args(argv + 1, argv + argc);
  const std::string& command = args.at(0);
  if (command == "encode") {
    encode(args.at(1), args.at(2), args.at(3));
  } else if (command == "decode") {
    decode(args.at(1), args.at(2), args.at(3));
  } else if (command == "quantize" || command == "dequantize") {
    rows(command == "quantize", {args.begin() + 1, args.end()});
  } else if (command == "kernels") {
    for (const kernels::KernelSet& set : kernels::available()) fmt::print("{}\n", set.name);
  } else {
    throw std::runtime_error("unknown command " + command);
  }
  return 0;
} catch (const std::exception& error) {
  fmt::print(stderr, "format_codec: {}\n", error.what());
  return 2;
}
