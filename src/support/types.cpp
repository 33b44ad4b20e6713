#include "wherry/types.hpp"

namespace wherry {

std::string_view name(DType dtype) noexcept {
  switch (dtype) {
    case DType::bf16: return "bf16";
    case DType::f16: return "f16";
    case DType::f32: return "f32";
    case DType::f64: return "f64";
    case DType::raw: return "raw";
  }
  return "raw";
}

std::string_view name(Device::Kind kind) noexcept {
  switch (kind) {
    case Device::Kind::cpu: return "cpu";
    case Device::Kind::cuda: return "cuda";
  }
  return "cpu";
}

}  // namespace wherry
