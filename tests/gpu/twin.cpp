#include "gpu/twin.hpp"

#include <algorithm>
#include <memory>

#include "gpu/compare.hpp"
#include "wherry/group.hpp"

namespace wherry::test {

namespace {

std::size_t size(std::int64_t value) { return static_cast<std::size_t>(value); }

// What an expert makes of a row: it depends on the slot, and on the rank for rows that several share.
void expert(DType x_dtype, const std::byte* x, DType y_dtype, std::byte* y, std::int64_t hidden,
            std::int64_t which) {
  const double scale = 1.0 + static_cast<double>(which) / 16.0;
  const double shift = which % 2 == 0 ? 0.25 : 0.0;  // with 0, rows of zeros stay that
  for (std::int64_t i = 0; i < hidden; ++i) {
    const double value = load(x_dtype, x + i * dtype_bytes(x_dtype)) * scale + shift;
    store(y_dtype, y + i * dtype_bytes(y_dtype), value);
  }
}

class Twin {
 public:
  Twin(const Group& group, int ordinal, cudaStream_t stream, const Case& test)
      : test_(test),
        group_(group),
        cpu_(group, cpu_config(test)),
        gpu_(group, Device::cuda(ordinal), test.config),
        cpu_plan_(cpu_.make_plan()),
        gpu_plan_(gpu_.make_plan()),
        stream_(stream),
        most_(size(test.config.max_tokens)),
        row_bytes_(test.config.hidden * dtype_bytes(test.config.dtype)),
        ids_(most_ * size(test.config.topk) * sizeof(std::int64_t)),
        weights_(most_ * size(test.config.topk) * sizeof(float)),
        x_(most_ * size(4 * row_bytes_ + 2 * kSkew)),
        x_scales_(size(scale_plane_bytes(way_out(test.config), test.config.max_tokens))),
        out_(most_ * size(row_bytes_)),
        sums_(most_ * size(row_bytes_)),
        addend_(most_ * size(row_bytes_)),
        scalars_(most_ * size(test.config.topk) * sizeof(float)),
        scalars_home_(most_ * size(test.config.topk) * sizeof(float)) {
    gpu_.set_stream(stream);
  }

  void step(int number) {
    const int rank = group_.rank();
    const StepInput input = input_of(test_, rank, number);
    const ExchangeConfig& config = test_.config;
    x_host_ = input.x.data();
    wired_ = wired(input);
    const ConstTensorView x = wired_.view(input.tokens);
    const float* weights = test_.no_weights ? nullptr : input.weights.data();
    cpu_.plan({input.ids.data(), weights, input.tokens, config.topk}, cpu_plan_);
    DispatchOptions options;
    if (test_.scalars) {
      scalars_out_ = input.weights;  // any numbers
      for (float& scalar : scalars_out_) scalar *= 3.0F;
      options.row_scalars = scalars_out_.data();
    }
    if (!wired_.scales.empty()) options.x_scales = wired_.scales.data();
    std::vector<std::byte> wide;
    if (test_.own_rows && !way_out(config).keeps_dtype()) {
      const PlanData& plan = cpu_plan_.to_host();
      const std::int64_t rows = token_rows() ? plan.token_rows_received : plan.slot_begin.back();
      wide.resize(size(rows * row_bytes_));
      options.out = {};
      options.out.data = wide.data();
      options.out.dtype = config.dtype;
      options.out.rows = rows;
      options.out.cols = config.hidden;
    }
    const Received here = cpu_.dispatch(cpu_plan_, x, options);

    upload(input);
    const Received there = dispatch(input);
    GPU_OK(cudaStreamSynchronize(stream_));
    gpu_.check();
    const At at{test_, rank, number};
    compare_plans(at, cpu_plan_.to_host(), gpu_plan_.to_host());
    compare_received(at, cpu_plan_.to_host(), here, there);
    if (config.dtype == DType::raw) {
      cpu_.release(here);
      gpu_.release(there);
      return;
    }
    combine(number, here);
    poison(there);
  }

  void compare_loads() {
    const auto cpu = cpu_.loads();
    const auto gpu = gpu_.loads();
    compare({test_, group_.rank(), -1}, "loads", std::vector<std::int64_t>(cpu.begin(), cpu.end()),
            std::vector<std::int64_t>(gpu.begin(), gpu.end()));
  }

 private:
  static constexpr std::int64_t kSkew = 16;

  // x as it is given to dispatch: in its dtype, or in the wire's format.
  struct Wired {
    std::vector<std::byte> rows;
    std::vector<std::byte> scales;
    DType dtype = DType::raw;
    std::int64_t cols = 0;
    std::int64_t row_bytes = 0;
    [[nodiscard]] ConstTensorView view(std::int64_t tokens) const {
      return {rows.data(), dtype, tokens, cols};
    }
  };
  [[nodiscard]] Wired wired(const StepInput& input) const {
    const ExchangeConfig& c = test_.config;
    if (!test_.converted) return {input.x, {}, c.dtype, c.hidden, row_bytes_};
    const WireFormat wire = way_out(c);
    Wired result;
    result.row_bytes = wire.payload_bytes;
    result.rows.resize(size(input.tokens * wire.payload_bytes));
    result.scales.resize(size(scale_plane_bytes(wire, input.tokens)));
    result.dtype = DType::raw;
    result.cols = wire.payload_bytes;
    for (const DType dtype : {DType::bf16, DType::f16, DType::f32, DType::f64}) {
      if (!wire.quantised() && name(dtype) == name(wire.wire)) result.dtype = dtype;
    }
    if (!wire.quantised()) result.cols = c.hidden;
    quantize(wire, {input.x.data(), c.dtype, input.tokens, c.hidden},
             {result.rows.data(), result.scales.data(), input.tokens, wire.payload_bytes});
    return result;
  }

  // The CPU has no set of kernels by these names.
  static ExchangeConfig cpu_config(const Case& test) {
    ExchangeConfig config = test.config;
    config.kernels.clear();
    return config;
  }

  void upload(const StepInput& input) {
    if (test_.wide_ids) {
      const std::vector<std::int64_t> wide(input.ids.begin(), input.ids.end());
      ids_.upload(wide.data(), wide.size() * sizeof(std::int64_t));
    } else {
      ids_.upload(input.ids.data(), input.ids.size() * sizeof(std::int32_t));
    }
    weights_.upload(input.weights.data(), input.weights.size() * sizeof(float));
    if (input.tokens > 0) {
      GPU_OK(cudaMemcpy2D(x_.as<std::byte>() + test_.skewed, size(x_pitch()), wired_.rows.data(),
                          size(wired_.row_bytes), size(wired_.row_bytes), size(input.tokens),
                          cudaMemcpyHostToDevice));
    }
    x_scales_.upload(wired_.scales.data(), wired_.scales.size());
    if (test_.addend) addend_.upload(input.x.data(), input.x.size());
    if (test_.scalars) scalars_.upload(scalars_out_.data(), scalars_out_.size() * sizeof(float));
    GPU_OK(cudaDeviceSynchronize());
  }

  [[nodiscard]] std::int64_t x_pitch() const { return wired_.row_bytes + test_.skewed; }

  Received dispatch(const StepInput& input) {
    const ExchangeConfig& config = test_.config;
    ConstTensorView x{x_.as<std::byte>() + test_.skewed, wired_.dtype, input.tokens, wired_.cols};
    x.pitch_bytes = x_pitch();
    const float* weights = test_.no_weights ? nullptr : weights_.as<float>();
    const Routing routing =
        test_.wide_ids ? Routing{ids_.as<std::int64_t>(), weights, input.tokens, config.topk}
                       : Routing{ids_.as<std::int32_t>(), weights, input.tokens, config.topk};
    DispatchOptions options;
    if (test_.scalars) options.row_scalars = scalars_.as<float>();
    if (!wired_.scales.empty()) options.x_scales = x_scales_.get();
    if (test_.own_rows) {
      if (rows_ == nullptr) rows_ = std::make_unique<Buffer>(wide_bytes());
      options.out = {};
      options.out.data = rows_->as<std::byte>() + test_.skewed;
      options.out.pitch_bytes = row_bytes_ + test_.skewed;
      options.out.dtype = config.dtype;
      options.out.rows = 1 << 20;  // enough, and only what comes is written
      options.out.cols = config.hidden;
    }
    if (test_.fused) return gpu_.plan_dispatch(routing, gpu_plan_, x, options);
    gpu_.plan(routing, gpu_plan_);
    if (test_.halves) return gpu_.dispatch_begin(gpu_plan_, x, options).finish();
    return gpu_.dispatch(gpu_plan_, x, options);
  }

  // Enough for the rows of a window in their own dtype, and some bytes between them.
  [[nodiscard]] std::size_t wide_bytes() const {
    return gpu_.window_bytes() * (converts(test_.config) || test_.skewed != 0 ? 32 : 1);
  }
  [[nodiscard]] bool token_rows() const { return test_.config.layout == Layout::tokens; }

  // Runs the experts on the host for both.
  void combine(int number, const Received& here) {
    const int rank = group_.rank();
    const ExchangeConfig& config = test_.config;
    const PlanData& plan = cpu_plan_.to_host();
    const std::int64_t rows = token_rows() ? plan.token_rows_received : plan.slot_begin.back();
    std::vector<std::byte> results(keeps_results(config) ? 0 : size(rows * row_bytes_));
    TensorView y;
    if (keeps_results(config)) {
      y = cpu_.combine_input(cpu_plan_);
    } else {
      y.data = results.data();
      y.dtype = config.dtype;
      y.rows = rows;
      y.cols = config.hidden;
    }
    std::vector<std::byte> plain(size(row_bytes_));
    const auto run = [&](std::int64_t row, std::int64_t which) {
      const std::byte* x = here.rows.row(row);
      DType dtype = here.rows.dtype;
      if (here.wire.quantised()) {  // any numbers will do
        dtype = config.dtype;
        for (std::int64_t i = 0; i < config.hidden; ++i) {
          store(config.dtype, plain.data() + i * dtype_bytes(config.dtype),
                static_cast<double>(std::to_integer<int>(x[i % here.wire.payload_bytes])) - 100.0);
        }
        x = plain.data();
      }
      expert(dtype, x, config.dtype, y.row(row), config.hidden, which);
    };
    const int first_slot = cpu_.placement().slot_begin()[size(rank)];
    if (token_rows()) {
      for (std::int64_t row = 0; row < plan.token_rows_received; ++row) run(row, rank);
    } else {
      for (std::size_t slot = 0; slot < plan.slot_counts.size(); ++slot) {
        for (std::int64_t i = 0; i < plan.slot_counts[slot]; ++i) {
          run(plan.slot_begin[slot] + i, first_slot + static_cast<std::int64_t>(slot));
        }
      }
    }
    const std::int64_t tokens = gpu_plan_.tokens();
    upload_results(y);

    std::vector<std::byte> sums(size(tokens * row_bytes_));
    TensorView out;
    out.data = sums.data();
    out.dtype = config.dtype;
    out.rows = tokens;
    out.cols = config.hidden;
    CombineOptions cpu_options;
    CombineOptions gpu_options;
    std::vector<float> home(size(tokens * config.topk));
    std::vector<float> row_scalars(size(plan.slot_begin.back()));
    for (std::size_t i = 0; i < row_scalars.size(); ++i)
      row_scalars[i] = 0.5F * static_cast<float>(i);
    const Buffer gpu_scalars(row_scalars.size() * sizeof(float));
    if (test_.scalars) {
      cpu_options.row_scalars = row_scalars.data();
      cpu_options.scalars_out = home.data();
      GPU_OK(cudaMemcpy(gpu_scalars.get(), row_scalars.data(), row_scalars.size() * sizeof(float),
                        cudaMemcpyHostToDevice));
      scalars_home_.poison();
      gpu_options.row_scalars = gpu_scalars.as<float>();
      gpu_options.scalars_out = scalars_home_.as<float>();
    }
    if (test_.addend) {  // x itself, a residual
      cpu_options.addend = {x_host_, config.dtype, tokens, config.hidden};
      gpu_options.addend = {addend_.get(), config.dtype, tokens, config.hidden};
    }
    cpu_.combine(cpu_plan_, y, out, cpu_options);

    sums_.poison();
    GPU_OK(cudaDeviceSynchronize());
    TensorView gpu_out = out;
    gpu_out.data = sums_.get();
    if (test_.halves) {
      gpu_.combine_begin(gpu_plan_, gpu_y_, gpu_out, gpu_options).finish();
    } else {
      gpu_.combine(gpu_plan_, gpu_y_, gpu_out, gpu_options);
    }
    GPU_OK(cudaStreamSynchronize(stream_));
    gpu_.check();
    const auto of_gpu = download(sums_.as<std::byte>(), sums.size());
    const At at{test_, rank, number};
    compare_rows(at, "sums", {sums.data(), row_bytes_}, {of_gpu.data(), row_bytes_}, row_bytes_,
                 {0, tokens});
    if (!test_.scalars) return;
    compare(at, "scalars home", home, download(scalars_home_.as<float>(), home.size()));
  }

  void upload_results(const TensorView& y) {
    const PlanData& plan = cpu_plan_.to_host();
    const std::int64_t rows = token_rows() ? plan.token_rows_received : plan.slot_begin.back();
    const bool own = test_.own_results || !keeps_results(test_.config);
    if (own) {
      if (results_ == nullptr) results_ = std::make_unique<Buffer>(wide_bytes());
      gpu_y_ = y;
      gpu_y_.data = results_->as<std::byte>() + test_.skewed;
      gpu_y_.rows = rows;
      gpu_y_.pitch_bytes = row_bytes_ + test_.skewed;
    } else {
      gpu_y_ = gpu_.combine_input(gpu_plan_);
    }
    if (rows == 0) return;
    GPU_OK(cudaMemcpy2D(gpu_y_.data, size(gpu_y_.pitch()), y.data, size(y.pitch()),
                        size(row_bytes_), size(rows), cudaMemcpyHostToDevice));
    GPU_OK(cudaDeviceSynchronize());
  }

  // What an earlier step has left must not be seen by a later one. Peers have read the results of this one
  // when all are here, and write only after the second barrier.
  void poison(const Received& there) {
    group_.barrier();
    if (!test_.own_rows) {
      GPU_OK(cudaMemset(there.rows.data, 0xFF, size(there.rows.rows * there.rows.pitch())));
    }
    if (!test_.own_results && keeps_results(test_.config)) {
      GPU_OK(cudaMemset(gpu_y_.data, 0xFF, size(gpu_y_.rows * gpu_y_.pitch())));
    }
    GPU_OK(cudaDeviceSynchronize());
    group_.barrier();
  }

  const Case& test_;
  const Group& group_;
  Exchange cpu_;
  Exchange gpu_;
  Plan cpu_plan_;
  Plan gpu_plan_;
  cudaStream_t stream_;
  std::size_t most_;
  std::int64_t row_bytes_;
  Wired wired_;  // of the step that runs
  Buffer ids_, weights_, x_, x_scales_, out_, sums_, addend_, scalars_, scalars_home_;
  std::vector<float> scalars_out_;
  const std::byte* x_host_ = nullptr;  // of the step that runs
  std::unique_ptr<Buffer> rows_, results_;
  TensorView gpu_y_;
};

}  // namespace

void run_twin(const Group& group, int ordinal, cudaStream_t stream, const Case& test) {
  try {
    Twin twin(group, ordinal, stream, test);
    for (int step = 0; step < test.steps; ++step) twin.step(step);
    twin.compare_loads();
    group.barrier();
  } catch (const Error& error) {
    throw std::runtime_error(
        fmt::format("{}: rank {}: {}", test.name(), group.rank(), error.what()));
  }
}

void on_processes(int ranks, const std::function<void(Group&, int, cudaStream_t)>& body) {
  run_processes(ranks, [&](Group& group) {
    const int ordinal = choose_gpu(group.rank());
    const Stream stream;
    body(group, ordinal, stream.get());
  });
}

void on_threads(int ranks, const std::function<void(Group&, int, cudaStream_t)>& body) {
  GPU_OK(cudaSetDevice(0));
  const Stream stream;
  run_threads(ranks, [&](Group& group) {
    GPU_OK(cudaSetDevice(0));
    body(group, 0, stream.get());
  });
}

}  // namespace wherry::test
