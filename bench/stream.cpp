// Compiled once for every instruction set by Highway; the best one of this machine runs.
#include "stream.hpp"

#include <hwy/cache_control.h>

#include <cstring>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "stream.cpp"
#include <hwy/foreach_target.h>  // NOLINT(misc-include-cleaner): must come before highway.h
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace wherry::bench::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using Bytes = hn::CappedTag<std::uint64_t, 8>;  // at most one cache line a vector

void stream_row(std::uint64_t* to, const std::uint64_t* from, std::size_t words) {
  const Bytes d;
  for (std::size_t i = 0; i < words; i += 8) {
    for (std::size_t part = 0; part < 8; part += hn::Lanes(d)) {
      hn::Stream(hn::Load(d, from + i + part), d, to + i + part);
    }
  }
}

std::uint64_t fold_row(const std::uint64_t* from, std::size_t words) {
  const Bytes d;
  auto fold = hn::Zero(d);
  for (std::size_t i = 0; i < words; i += 8) {
    for (std::size_t part = 0; part < 8; part += hn::Lanes(d)) {
      fold = hn::Add(fold, hn::Load(d, from + i + part));
    }
  }
  return hn::GetLane(hn::SumOfLanes(d, fold));
}

}  // namespace wherry::bench::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace wherry::bench {

HWY_EXPORT(stream_row);
HWY_EXPORT(fold_row);

void copy_row(std::byte* to, const std::byte* from, std::size_t bytes, Stores stores) {
  if (stores == Stores::ordinary) {
    std::memcpy(to, from, bytes);
    return;
  }
  HWY_DYNAMIC_DISPATCH(stream_row)
  (reinterpret_cast<std::uint64_t*>(to), reinterpret_cast<const std::uint64_t*>(from),
   bytes / sizeof(std::uint64_t));
}

void finish_copies() { hwy::FlushStream(); }

std::uint64_t read_row(const std::byte* from, std::size_t bytes) {
  return HWY_DYNAMIC_DISPATCH(fold_row)(reinterpret_cast<const std::uint64_t*>(from),
                                        bytes / sizeof(std::uint64_t));
}

}  // namespace wherry::bench
#endif
