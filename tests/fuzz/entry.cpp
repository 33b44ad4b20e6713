// Where libFuzzer calls: an exception is a finding.
#include <cstdio>
#include <cstdlib>
#include <exception>

#include "fuzz/numbers.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try {
    wherry::test::run(wherry::test::Bytes({data, size}));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    std::abort();
  }
  return 0;
}
