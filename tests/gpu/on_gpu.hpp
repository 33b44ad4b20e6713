// An exchange on a GPU for tests that compare nothing: errors, and who waits for whom.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "gpu/memory.hpp"
#include "wherry/exchange.hpp"

namespace wherry::test {

// One rank's exchange on the GPU with memory for a step.
struct OnGpu {
  OnGpu(const Group& group, int ordinal, cudaStream_t stream_in, const ExchangeConfig& config)
      : stream(stream_in),
        exchange(group, Device::cuda(ordinal), config),
        plan(exchange.make_plan()),
        ids(static_cast<std::size_t>(2 * config.max_tokens * config.topk) * sizeof(std::int32_t)),
        x(static_cast<std::size_t>(config.max_tokens * config.hidden) * 2),
        out(static_cast<std::size_t>(config.max_tokens * config.hidden) * 2) {
    exchange.set_stream(stream);
  }
  void make_plan(const std::vector<std::int32_t>& ids_in, std::int64_t tokens) {
    ids.upload(ids_in.data(), ids_in.size() * sizeof(std::int32_t));
    exchange.plan({ids.as<std::int32_t>(), nullptr, tokens, exchange.config().topk}, plan);
  }
  // In one launch, where the shape allows.
  void plan_dispatch(const std::vector<std::int32_t>& ids_in, std::int64_t tokens) {
    ids.upload(ids_in.data(), ids_in.size() * sizeof(std::int32_t));
    exchange.plan_dispatch({ids.as<std::int32_t>(), nullptr, tokens, exchange.config().topk}, plan,
                           rows(tokens));
  }
  void combine() { exchange.combine(plan, exchange.combine_input(plan), sums(plan.tokens())); }
  [[nodiscard]] ConstTensorView rows(std::int64_t tokens) const {
    return {x.get(), DType::bf16, tokens, exchange.config().hidden};
  }
  [[nodiscard]] TensorView sums(std::int64_t tokens) const {
    TensorView sums;
    sums.data = out.get();
    sums.dtype = DType::bf16;
    sums.rows = tokens;
    sums.cols = exchange.config().hidden;
    return sums;
  }
  // A step without experts.
  void step(std::int64_t tokens) {
    exchange.dispatch(plan, rows(tokens));
    combine();
  }

  cudaStream_t stream;
  Exchange exchange;
  Plan plan;
  Buffer ids, x, out;
};

}  // namespace wherry::test
