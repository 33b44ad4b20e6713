// A layer on GPUs: steps of decode in a captured graph, experts and all, beside the same layer on the CPU.
#include <cuda_runtime_api.h>

#include <cstring>

#include "examples.hpp"

using namespace wherry;

namespace {

constexpr int kExperts = 8;
constexpr int kTopk = 2;
constexpr std::int64_t kTokens = 16;
constexpr std::int64_t kHidden = 256;

void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

// `count` values of a GPU, freed with the process.
template <typename T>
T* on_gpu(const std::vector<T>& values) {
  void* memory = nullptr;
  check(cudaMalloc(&memory, values.size() * sizeof(T)));
  check(cudaMemcpy(memory, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  return static_cast<T*>(memory);
}

void fill_weights(int expert, Matrix /*matrix*/, TensorView weights) {
  for (std::int64_t row = 0; row < weights.rows; ++row) {
    for (std::int64_t col = 0; col < weights.cols; ++col) {
      weights.row<float>(row)[col] = static_cast<float>((expert + row * 3 + col) % 7 - 3) / 64.0F;
    }
  }
}

GatedMlp experts_of(const Exchange& exchange) {
  const auto rank = static_cast<std::size_t>(exchange.rank());
  const auto first = static_cast<std::size_t>(exchange.placement().slot_begin()[rank]);
  const auto end = static_cast<std::size_t>(exchange.placement().slot_begin()[rank + 1]);
  return {exchange.device(),
          {.hidden = kHidden, .expert_hidden = 64, .dtype = DType::f32},
          exchange.placement().slot_to_expert().subspan(first, end - first),
          fill_weights};
}

std::vector<float> on_the_cpu(Group& group, const ExchangeConfig& config, Tokens& tokens) {
  Exchange exchange(group, config);
  GatedMlp experts = experts_of(exchange);
  Plan plan = exchange.make_plan();
  exchange.plan(tokens.routing(), plan);
  const Received received = exchange.dispatch(plan, tokens.rows());
  const TensorView y = exchange.combine_input(plan);
  experts.forward_slots(received.rows, received.slot_counts, y);
  exchange.combine(plan, y, tokens.sums());
  return tokens.out;
}

void run_rank(Group& group) {
  int gpus = 0;
  if (cudaGetDeviceCount(&gpus) != cudaSuccess || gpus == 0) {
    if (group.rank() == 0) std::printf("no GPU here\n");
    return;
  }
  const ExchangeConfig config{.experts = kExperts,
                              .topk = kTopk,
                              .hidden = kHidden,
                              .max_tokens = kTokens,
                              .dtype = DType::f32,
                              .layout = Layout::slots};
  Tokens tokens(group.rank(), kExperts, kTopk, kTokens, kHidden);
  const std::vector<float> expected = on_the_cpu(group, config, tokens);
  const Device device = Device::cuda(group.rank() % gpus);
  check(cudaSetDevice(device.ordinal));
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  const Routing routing{on_gpu(tokens.ids), on_gpu(tokens.weights), kTokens, kTopk};
  const ConstTensorView x{on_gpu(tokens.x), DType::f32, kTokens, kHidden};
  const TensorView out{
      {on_gpu(std::vector<float>(tokens.out.size())), DType::f32, kTokens, kHidden}};

  // [snippet gpu]
  Exchange exchange(group, device, config);  // rows, ids, weights and sums are device memory
  GatedMlp experts = experts_of(exchange);
  exchange.set_stream(stream);
  experts.set_stream(stream);
  Plan plan = exchange.make_plan();
  const auto step = [&] {
    const Received received = exchange.plan_dispatch(routing, plan, x);
    const TensorView y = exchange.combine_input(plan);
    experts.forward_slots(received.rows, {}, y);  // no counts: nothing here waits for the GPU
    exchange.combine(plan, y, out);
  };
  step();  // once, so that every buffer is there
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t steps = nullptr;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  step();
  check(cudaStreamEndCapture(stream, &graph));
  check(cudaGraphInstantiate(&steps, graph, 0));
  for (int i = 0; i < 100; ++i)
    check(cudaGraphLaunch(steps, stream));  // with whatever ids hold then
  check(cudaStreamSynchronize(stream));
  exchange.check();  // throws what the GPU has found: a bad id, a rank that did not come
  // [end]
  check(cudaMemcpy(tokens.out.data(), out.data, tokens.out.size() * sizeof(float),
                   cudaMemcpyDeviceToHost));
  for (std::size_t i = 0; i < expected.size(); ++i) {
    if (std::fabs(tokens.out[i] - expected[i]) > 1e-4F * (1.0F + std::fabs(expected[i]))) {
      throw std::runtime_error("the GPU computed something else than the CPU");
    }
  }
  if (group.rank() == 0) {
    std::printf("right, over %.*s\n", static_cast<int>(exchange.fabric().size()),
                exchange.fabric().data());
  }
}

}  // namespace

int main() { run_processes(2, run_rank); }
