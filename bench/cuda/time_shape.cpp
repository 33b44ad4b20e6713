#include "time_shape.hpp"

#include <algorithm>
#include <span>
#include <utility>

#include "meeting.hpp"
#include "rank.hpp"
#include "support/cuda.hpp"

namespace wherry::bench {

namespace {

constexpr Error::Where kWhere{};
#define CUDA_OK(call) ::wherry::cuda::check((call), kWhere, #call)

// Of all ranks, replay by replay, the slowest; on every rank.
std::vector<float> slowest(const Group& group, const std::vector<float>& mine) {
  std::vector<float> most;
  for (const Group::Bytes& bytes : group.allgather(std::as_bytes(std::span(mine)))) {
    const auto* theirs = reinterpret_cast<const float*>(bytes.data());
    const std::size_t count = bytes.size() / sizeof(float);
    most.resize(std::max(most.size(), count), 0.0F);
    for (std::size_t i = 0; i < count; ++i) most[i] = std::max(most[i], theirs[i]);
  }
  return most;
}

struct Bytes {
  double dispatch, combine;
};
Bytes fewest_bytes(RanksAs ranks_as, const GpuShape& shape) {
  const auto rows = static_cast<double>(rows_sent(shape));
  const auto tokens = static_cast<double>(shape.tokens) * shape.ranks;
  const auto row = static_cast<double>(shape.row_bytes() + shape.scale_bytes());
  const auto x = static_cast<double>(shape.x_bytes());
  if (ranks_as != RanksAs::gpus) return {rows * row + tokens * x, (rows + tokens) * x};
  // What a rank sends to the others: one row per (token, rank), and the sum of one home; by_token every
  // row. Choices are even, so its share stays at home.
  GpuShape crossing = shape;
  if (shape.reduction == Reduction::by_rank) crossing.layout = Layout::tokens;
  const double remote =
      static_cast<double>(rows_sent(crossing)) / shape.ranks * (shape.ranks - 1) / shape.ranks;
  return {remote * row, remote * x};
}

class Stream {
 public:
  Stream() { CUDA_OK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  ~Stream() { static_cast<void>(cudaStreamDestroy(stream_)); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  [[nodiscard]] cudaStream_t get() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

ShapeTimes time_rank(const Group& group, int ordinal, cudaStream_t stream, RanksAs ranks_as,
                     const GpuShape& shape, double link_gbps, int num_replays) {
  Meeting meeting(group, Seconds(60.0 + shape.deadline));
  ShapeTimes times;
  times.gbps = link_gbps;
  if (ranks_as != RanksAs::gpus && group.rank() == 0) times.gbps = copy_rate();
  meeting.meet();
  RankOnGpu rank(group, ordinal, stream, shape);
  times.kernels = rank.exchange().kernels();
  times.fabric = rank.exchange().fabric();
  times.window_bytes = rank.exchange().window_bytes();
  times.num_sms = rank.exchange().config().num_sms;
  for (int i = 0; i < 2 * shape.depth; ++i) {
    rank.checked_step();
    meeting.meet();
  }
  const bool decode = shape.tokens <= 128;
  const int steps = decode ? 20 * shape.depth : 3 * shape.depth;
  times.steps = steps;
  Replays replays(ranks_as, group.rank(), meeting, stream);
  const Bytes bytes = fewest_bytes(ranks_as, shape);
  const auto add = [&](const char* stage, const std::vector<float>& us, double moved) {
    times.stages.push_back({stage, slowest(group, us), moved});
  };
  const Calls dispatch = [&] { rank.dispatch(); };
  const Calls plan_dispatch = [&] { rank.plan_dispatch(); };
  const Calls combine = [&] { rank.combine(); };
  const Calls plan_apart = [&] {
    rank.plan();
    rank.dispatch();
  };

  const Times in_hand = replays.time(steps, num_replays, true, dispatch, combine);
  add("dispatch", in_hand.first, bytes.dispatch);
  add("combine", in_hand.second, bytes.combine);
  const Times step = replays.time(steps, num_replays, false, dispatch, combine);
  add("step", step.whole, bytes.dispatch + bytes.combine);
  const Times planned = replays.time(steps, num_replays, true, plan_dispatch, combine);
  add("plan_dispatch", planned.first, bytes.dispatch);
  const Times whole = replays.time(steps, num_replays, false, plan_dispatch, combine);
  add("planned_step", whole.whole, bytes.dispatch + bytes.combine);
  const Times apart = replays.time(steps, num_replays, true, plan_apart, combine);
  add("plan, dispatch", apart.first, bytes.dispatch);
  rank.checked_step();
  meeting.meet();
  return times;
}

}  // namespace

void time_shape(RanksAs ranks_as, const GpuShape& shape, double link_gbps, int replays,
                const StartRanks& start, const std::function<void(const ShapeTimes&)>& report) {
  const auto run_rank = [&](const Group& group, int ordinal, cudaStream_t stream) {
    const ShapeTimes times = time_rank(group, ordinal, stream, ranks_as, shape, link_gbps, replays);
    if (group.rank() == 0) report(times);
  };
  if (ranks_as == RanksAs::threads) {
    CUDA_OK(cudaSetDevice(0));
    const Stream stream;  // one for all: they launch together
    start([&](Group& group) {
      CUDA_OK(cudaSetDevice(0));
      run_rank(group, 0, stream.get());
    });
    return;
  }
  start([&](Group& group) {
    int devices = 1;
    CUDA_OK(cudaGetDeviceCount(&devices));
    const int ordinal = ranks_as == RanksAs::gpus ? group.rank() % devices : 0;
    CUDA_OK(cudaSetDevice(ordinal));
    const Stream stream;
    run_rank(group, ordinal, stream.get());
  });
}

}  // namespace wherry::bench
