#include "experts/pages.hpp"

#include <sys/mman.h>

#include <cstdint>

#include "support/check.hpp"

namespace wherry::experts {

Pages::Pages(std::size_t bytes, const char* what) : bytes_(bytes) {
  if (bytes == 0) return;
  constexpr std::size_t kHugePage = std::size_t{2} << 20;
  mapping_bytes_ = bytes + kHugePage;
  void* const mapping =
      mmap(nullptr, mapping_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  WHERRY_CHECK(mapping != MAP_FAILED, ErrorCode::out_of_memory,
               (Error::Where{Stage::experts, -1, -1}), "no memory for {}: {} bytes", what, bytes);
  mapping_ = mapping;
  const auto address = reinterpret_cast<std::uintptr_t>(mapping);
  data_ = static_cast<std::byte*>(mapping) + ((kHugePage - address % kHugePage) % kHugePage);
  madvise(data_, bytes, MADV_HUGEPAGE);  // advice: small pages do as well
}

Pages::~Pages() {
  if (mapping_ != nullptr) munmap(mapping_, mapping_bytes_);
}

}  // namespace wherry::experts
