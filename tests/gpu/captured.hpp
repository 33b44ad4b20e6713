// `depth` whole steps of an exchange on a GPU, issued call by call or captured in a graph and replayed.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "gpu/twin.hpp"

namespace wherry::test {

// The sums of a step whose experts return what they get.
inline std::vector<std::byte> cpu_sums(Exchange& exchange, Plan& plan, const StepInput& input) {
  const ExchangeConfig& c = exchange.config();
  exchange.plan({input.ids.data(), input.weights.data(), input.tokens, c.topk}, plan);
  const Received rows = exchange.dispatch(plan, {input.x.data(), c.dtype, input.tokens, c.hidden});
  std::vector<std::byte> sums(input.x.size());
  TensorView out;
  out.data = sums.data();
  out.dtype = c.dtype;
  out.rows = input.tokens;
  out.cols = c.hidden;
  exchange.combine(plan, rows.rows, out);
  return sums;
}

class CapturedSteps {
 public:
  CapturedSteps(const Group& group, Exchange gpu, cudaStream_t stream, const Case& test)
      : test_(test),
        group_(group),
        gpu_(std::move(gpu)),
        stream_(stream) {
    gpu_.set_stream(stream);
    const auto depth = static_cast<std::size_t>(test.config.depth);
    for (std::size_t i = 0; i < depth; ++i) {
      const StepInput input = input_of(test, group.rank(), 0);
      plans_.push_back(gpu_.make_plan());
      ids_.push_back(std::make_unique<Buffer>(input.ids.size() * sizeof(std::int32_t)));
      weights_.push_back(std::make_unique<Buffer>(input.weights.size() * sizeof(float)));
      x_.push_back(std::make_unique<Buffer>(input.x.size()));
      sums_.push_back(std::make_unique<Buffer>(input.x.size()));
    }
  }

  // `depth` steps, not waiting in between. Routings of step `number` and the following.
  void load(int number) {
    for (std::size_t i = 0; i < plans_.size(); ++i) {
      const StepInput input = input_of(test_, group_.rank(), number + static_cast<int>(i));
      ids_[i]->upload(input.ids.data(), input.ids.size() * sizeof(std::int32_t));
      weights_[i]->upload(input.weights.data(), input.weights.size() * sizeof(float));
      x_[i]->upload(input.x.data(), input.x.size());
      sums_[i]->poison();
    }
    GPU_OK(cudaDeviceSynchronize());
  }
  void issue() {
    const ExchangeConfig& c = gpu_.config();
    const std::int64_t tokens = test_.batch.tokens_of(group_.rank());
    for (std::size_t i = 0; i < plans_.size(); ++i) {
      const Routing routing{ids_[i]->as<std::int32_t>(), weights_[i]->as<float>(), tokens, c.topk};
      const ConstTensorView x{x_[i]->get(), c.dtype, tokens, c.hidden};
      Received rows;
      if (test_.fused) {
        rows = gpu_.plan_dispatch(routing, plans_[i], x);
      } else {
        gpu_.plan(routing, plans_[i]);
        rows = gpu_.dispatch(plans_[i], x);
      }
      const TensorView y = gpu_.combine_input(plans_[i]);
      results_ = y.data;
      GPU_OK(cudaMemcpyAsync(y.data, rows.rows.data, static_cast<std::size_t>(y.rows * y.pitch()),
                             cudaMemcpyDeviceToDevice, stream_));
      TensorView out;
      out.data = sums_[i]->get();
      out.dtype = c.dtype;
      out.rows = tokens;
      out.cols = c.hidden;
      gpu_.combine(plans_[i], y, out);
    }
  }
  void capture() {
    cudaGraph_t graph = nullptr;
    GPU_OK(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
    issue();
    GPU_OK(cudaStreamEndCapture(stream_, &graph));
    GPU_OK(cudaGraphInstantiate(&graph_, graph, 0));
    GPU_OK(cudaGraphDestroy(graph));
  }
  void replay() { GPU_OK(cudaGraphLaunch(graph_, stream_)); }
  void wait() {
    GPU_OK(cudaStreamSynchronize(stream_));
    gpu_.check();
  }
  [[nodiscard]] std::vector<std::byte> sums(std::size_t i, std::size_t bytes) const {
    return download(sums_[i]->as<std::byte>(), bytes);
  }
  // Where the results of the last step were, in the window.
  [[nodiscard]] const void* results() const noexcept { return results_; }
  [[nodiscard]] Exchange& exchange() noexcept { return gpu_; }
  [[nodiscard]] const PlanData& plan(std::size_t i) const { return plans_[i].to_host(); }
  void destroy() { GPU_OK(cudaGraphExecDestroy(graph_)); }

 private:
  const Case& test_;
  const Group& group_;
  Exchange gpu_;
  cudaStream_t stream_;
  std::vector<Plan> plans_;
  std::vector<std::unique_ptr<Buffer>> ids_, weights_, x_, sums_;
  const void* results_ = nullptr;
  cudaGraphExec_t graph_ = nullptr;
};

}  // namespace wherry::test
