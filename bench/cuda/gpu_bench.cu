// gpu_bench FILE.json processes|threads|gpus [quick|decode]: medians of plan, dispatch and combine through the
// library's own calls, beside the floor of the same run, each shape checked before and after.
//
// processes  one process a rank on one GPU: start CUDA MPS first. The slowest rank counts
// threads    the ranks are threads of one process, so each stage is one launch for all of them
// gpus       one process and one GPU a rank; the floor is the link's, whose own figures come first
//
// A graph of several whole steps is replayed. `step` is one of it. The stages are told apart by stamps in
// another graph: kernels that read the clock (an event takes 20 us between processes under MPS). What a
// stamp takes by itself is measured there and taken off.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "link.hpp"
#include "meeting.hpp"
#include "rank.hpp"

namespace wherry::bench {

namespace {

constexpr Error::Where kWhere{};
#define CUDA_OK(call) ::wherry::cuda::check((call), kWhere, #call)

enum class RanksAs { processes, threads, gpus };
const char* name(RanksAs ranks_as) {
  switch (ranks_as) {
    case RanksAs::processes: return "processes";
    case RanksAs::threads: return "threads";
    case RanksAs::gpus: return "one a GPU";
  }
  return "";
}

float median(std::vector<float> values) {
  std::sort(values.begin(), values.end());
  return values.empty() ? 0.0F : values[values.size() / 2];
}
float percentile99(std::vector<float> values) {
  std::sort(values.begin(), values.end());
  return values.empty() ? 0.0F : values[(values.size() - 1) * 99 / 100];
}

class Event {
 public:
  Event() { CUDA_OK(cudaEventCreate(&event_)); }
  ~Event() { static_cast<void>(cudaEventDestroy(event_)); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  [[nodiscard]] cudaEvent_t get() const { return event_; }
  [[nodiscard]] float us_since(const Event& earlier) const {
    float ms = 0;
    CUDA_OK(cudaEventElapsedTime(&ms, earlier.get(), get()));
    return ms * 1000.0F;
  }

 private:
  cudaEvent_t event_ = nullptr;
};

// Bytes read plus bytes written, GB/s, of a large copy.
double copy_rate() {
  constexpr std::size_t kBytes = std::size_t{2} << 30;
  int device = 0;
  CUDA_OK(cudaGetDevice(&device));
  const cuda::DeviceMemory from(device, kBytes);
  const cuda::DeviceMemory to(device, kBytes);
  const Event begin, end;
  std::vector<float> times;
  for (int i = 0; i < 60; ++i) {  // the first ones wake the memory's clock up
    CUDA_OK(cudaEventRecord(begin.get(), nullptr));
    CUDA_OK(cudaMemcpyAsync(to.get(), from.get(), kBytes, cudaMemcpyDeviceToDevice, nullptr));
    CUDA_OK(cudaEventRecord(end.get(), nullptr));
    CUDA_OK(cudaEventSynchronize(end.get()));
    if (i >= 30) times.push_back(end.us_since(begin));
  }
  return 2.0 * static_cast<double>(kBytes) / static_cast<double>(median(times)) / 1e3;
}

// --- A rank's times -------------------------------------------------------------------------------

__global__ void stamp(std::uint64_t* to) {
  std::uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  *to = now;
}

// Microseconds of a step, or of its first and second part, one a replay.
struct Times {
  std::vector<float> whole, first, second;
};
using Calls = std::function<void()>;

class Replays {
 public:
  Replays(RanksAs ranks_as, int rank, Meeting& meeting, cudaStream_t stream)
      : ranks_as_(ranks_as),
        rank_(rank),
        meeting_(meeting),
        stream_(stream) {}

  // A graph of `steps` steps, each `first` and then `second`, replayed. Where the ranks launch together
  // one of them captures and replays what all have called; the others get no times.
  Times time(int steps, int replays, bool apart, const Calls& first, const Calls& second) {
    constexpr int kMarks = 4;  // a step: before first, after it, after second, and once more
    const bool leads = ranks_as_ != RanksAs::threads || rank_ == 0;
    int device = 0;
    CUDA_OK(cudaGetDevice(&device));
    std::vector<std::uint64_t> stamps(static_cast<std::size_t>(apart ? kMarks * steps : 0));
    const cuda::DeviceMemory memory(device, stamps.size() * sizeof(std::uint64_t));
    const auto mark = [&](int at) {
      if (!apart || !leads) return;
      stamp<<<1, 1, 0, stream_>>>(reinterpret_cast<std::uint64_t*>(memory.get()) + at);
      CUDA_OK(cudaGetLastError());
    };
    const auto in_turn = [this] {
      if (ranks_as_ == RanksAs::threads) meeting_.meet();
    };
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    in_turn();
    if (leads) CUDA_OK(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeRelaxed));
    in_turn();
    for (int step = 0; step < steps; ++step) {
      mark(kMarks * step);
      in_turn();
      first();
      in_turn();
      mark(kMarks * step + 1);
      in_turn();
      second();
      in_turn();
      mark(kMarks * step + 2);
      mark(kMarks * step + 3);
    }
    Times times;
    if (leads) {
      CUDA_OK(cudaStreamEndCapture(stream_, &graph));
      CUDA_OK(cudaGraphInstantiate(&executable, graph, 0));
      const Event begin, end;
      for (int i = 0; i < replays + 2; ++i) {
        if (ranks_as_ != RanksAs::threads) meeting_.meet();
        CUDA_OK(cudaEventRecord(begin.get(), stream_));
        CUDA_OK(cudaGraphLaunch(executable, stream_));
        CUDA_OK(cudaEventRecord(end.get(), stream_));
        CUDA_OK(cudaEventSynchronize(end.get()));
        if (i < 2) continue;
        times.whole.push_back(end.us_since(begin) / static_cast<float>(steps));
        if (!apart) continue;
        CUDA_OK(cudaMemcpy(stamps.data(), memory.get(), stamps.size() * sizeof(std::uint64_t),
                           cudaMemcpyDeviceToHost));
        float sums[kMarks] = {};
        for (std::size_t at = 1; at < stamps.size(); ++at) {
          sums[at % kMarks] += static_cast<float>(stamps[at] - stamps[at - 1]) / 1000.0F;
        }
        times.first.push_back((sums[1] - sums[3]) / static_cast<float>(steps));
        times.second.push_back((sums[2] - sums[3]) / static_cast<float>(steps));
      }
      CUDA_OK(cudaGraphExecDestroy(executable));
      CUDA_OK(cudaGraphDestroy(graph));
    }
    in_turn();
    return times;
  }

 private:
  RanksAs ranks_as_;
  int rank_;
  Meeting& meeting_;
  cudaStream_t stream_;
};

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

// --- Results --------------------------------------------------------------------------------------

// Rows of the file, one a line, added by rank 0 of whichever process.
class Results {
 public:
  Results(std::string path, std::string command)
      : path_(std::move(path)),
        command_(std::move(command)) {
    std::ofstream(rows_path(), std::ios::trunc);
  }
  // Puts the lines together.
  void finish() const {
    const auto variable = [](const char* name) {
      const char* value = std::getenv(name);
      return std::string(value != nullptr ? value : "unknown");
    };
    std::ofstream file(path_, std::ios::trunc);
    file << "{\"machine\": \"" << variable("WHERRY_MACHINE") << "\", \"driver\": \""
         << variable("WHERRY_DRIVER") << "\", \"cuda\": \"" << variable("WHERRY_NVCC")
         << "\", \"compiler\": \"" << variable("WHERRY_COMPILER") << "\", \"commit\": \""
         << variable("WHERRY_COMMIT") << "\", \"command\": \"" << command_
         << "\",\n \"results\": [";
    std::ifstream rows(rows_path());
    bool first = true;
    for (std::string row; std::getline(rows, row); first = false) {
      file << (first ? "\n  " : ",\n  ") << row;
    }
    file << "\n]}\n";
    std::remove(rows_path().c_str());
  }

  // The link's own figures; percentages are of its best copy by a kernel that runs both ways at once.
  // In a process of its own: this one must not touch CUDA before it forks.
  void measure_the_link() {
    run_processes(1, [this](Group&) { add_link(); });
    std::ifstream rows(rows_path());
    const std::string field = "\"kernel_gbps\": ";
    for (std::string row; std::getline(rows, row);) {
      const std::size_t at = row.find(field);
      if (at != std::string::npos) link_gbps_ = std::stod(row.substr(at + field.size()));
    }
  }
  void add_link() const {
    double engine = 0.0;
    double best = 0.0;
    const auto add_line = [this](const char* line) {
      std::ofstream(rows_path(), std::ios::app) << line << '\n';
      std::printf("%s\n", line);
    };
    char line[256];
    for (const LinkRate& rate : measure_link()) {
      if (rate.blocks == 0) engine = rate.both_ways;
      const bool over = rate.how != "engine" && rate.how != "bulk store at home";
      if (over) best = std::max(best, rate.both_ways);
      std::snprintf(line, sizeof(line),
                    "{\"link\": \"%s\", \"blocks\": %d, \"one_way_gbps\": %.1f, "
                    "\"both_ways_gbps\": %.1f}",
                    rate.how.c_str(), rate.blocks, rate.one_way, rate.both_ways);
      add_line(line);
    }
    const RoundTrip trip = measure_round_trip();
    std::snprintf(line, sizeof(line),
                  "{\"link\": \"round trip\", \"relaxed_us\": %.2f, \"ordered_us\": %.2f, "
                  "\"kernel_gbps\": %.1f, \"engine_gbps\": %.1f}",
                  trip.relaxed, trip.ordered, best, engine);
    add_line(line);
  }
  [[nodiscard]] double link_gbps() const { return link_gbps_; }

  struct Row {
    RanksAs ranks_as;
    const Shape& shape;
    const char* stage;
    const std::vector<float>& us;
    double bytes;  // the fewest: each input read once, each output written once; or over the link
    double gbps;   // at which they could move
  };
  void add(const Row& row) const {
    if (row.us.empty()) return;
    const auto middle = static_cast<double>(median(row.us));
    const auto p99 = static_cast<double>(percentile99(row.us));
    const double floor_us = row.bytes / row.gbps / 1e3;
    const Shape& s = row.shape;
    char line[768];
    std::snprintf(line, sizeof(line),
                  "{\"ranks_as\": \"%s\", \"stage\": \"%s\", \"layout\": \"%s\", \"reduction\": "
                  "\"%s\", \"sum_at\": \"%s\", \"dispatch_wire\": \"%s\", \"kernels\": \"%s\", "
                  "\"ranks\": %d, \"sms\": %d, \"tokens\": %d, \"hidden\": %d, \"topk\": %d, "
                  "\"experts\": %d, \"median_us\": %.2f, \"p99_us\": %.2f, \"floor_us\": %.2f, "
                  "\"floor_percent\": %.1f, \"copy_gbps\": %.0f, \"right\": true}",
                  bench::name(row.ranks_as), row.stage, std::string(wherry::name(s.layout)).c_str(),
                  std::string(wherry::name(s.reduction)).c_str(),
                  std::string(wherry::name(s.sum_at)).c_str(), s.e4m3 ? "e4m3_block128" : "bf16",
                  *s.kernels != '\0' ? s.kernels : "cuda", s.ranks, s.num_sms, s.tokens, s.hidden,
                  s.topk, s.experts, middle, p99, floor_us, 100.0 * floor_us / middle, row.gbps);
    std::ofstream(rows_path(), std::ios::app) << line << '\n';
    std::printf(
        "%-9s %dx%-2d T%-4d H%-4d K%-2d %-8s %-8s %-6s %-14s %8.1f us  %5.1f%%  p99 %8.1f\n",
        bench::name(row.ranks_as), s.ranks, s.num_sms, s.tokens, s.hidden, s.topk,
        std::string(wherry::name(s.layout)).c_str(), std::string(wherry::name(s.reduction)).c_str(),
        std::string(wherry::name(s.sum_at)).c_str(), row.stage, middle, 100.0 * floor_us / middle,
        p99);
    std::fflush(stdout);
  }

 private:
  [[nodiscard]] std::string rows_path() const { return path_ + ".rows"; }
  std::string path_;
  std::string command_;
  double link_gbps_ = 0.0;
};

struct Bytes {
  double dispatch, combine;
};
Bytes fewest_bytes(RanksAs ranks_as, const Shape& shape) {
  const auto rows = static_cast<double>(rows_sent(shape));
  const auto tokens = static_cast<double>(shape.tokens) * shape.ranks;
  const auto row = static_cast<double>(shape.row_bytes() + shape.scale_bytes());
  const auto x = static_cast<double>(shape.x_bytes());
  if (ranks_as != RanksAs::gpus) return {rows * row + tokens * x, (rows + tokens) * x};
  // What a rank sends to the others: one row per (token, rank), and the sum of one home; by_token every
  // row. Choices are even, so its share stays at home.
  Shape crossing = shape;
  if (shape.reduction == Reduction::by_rank) crossing.layout = Layout::tokens;
  const double remote =
      static_cast<double>(rows_sent(crossing)) / shape.ranks * (shape.ranks - 1) / shape.ranks;
  return {remote * row, remote * x};
}

// --- A shape ------------------------------------------------------------------------------------

void time_shape(const Group& group, int ordinal, cudaStream_t stream, RanksAs ranks_as,
                const Shape& shape, const Results& results) {
  Meeting meeting(group, Seconds(60.0));
  double gbps = 0.0;
  if (ranks_as == RanksAs::gpus) {
    gbps = results.link_gbps();
  } else if (group.rank() == 0) {
    gbps = copy_rate();
  }
  meeting.meet();
  RankOnGpu rank(group, ordinal, stream, shape);
  for (int i = 0; i < 2 * shape.depth; ++i) {
    rank.checked_step();
    meeting.meet();
  }
  const bool decode = shape.tokens <= 128;
  const int steps = decode ? 20 * shape.depth : 3 * shape.depth;
  constexpr int kReplays = 32;
  Replays replays(ranks_as, group.rank(), meeting, stream);
  const Bytes bytes = fewest_bytes(ranks_as, shape);
  const auto add = [&](const char* stage, const std::vector<float>& us, double moved) {
    const std::vector<float> most = slowest(group, us);
    if (group.rank() == 0) results.add({ranks_as, shape, stage, most, moved, gbps});
  };
  const Calls dispatch = [&] { rank.dispatch(); };
  const Calls plan_dispatch = [&] { rank.plan_dispatch(); };
  const Calls combine = [&] { rank.combine(); };
  const Calls plan_apart = [&] {
    rank.plan();
    rank.dispatch();
  };

  const Times in_hand = replays.time(steps, kReplays, true, dispatch, combine);
  add("dispatch", in_hand.first, bytes.dispatch);
  add("combine", in_hand.second, bytes.combine);
  const Times step = replays.time(steps, kReplays, false, dispatch, combine);
  add("step", step.whole, bytes.dispatch + bytes.combine);
  const Times planned = replays.time(steps, kReplays, true, plan_dispatch, combine);
  add("plan_dispatch", planned.first, bytes.dispatch);
  const Times whole = replays.time(steps, kReplays, false, plan_dispatch, combine);
  add("planned_step", whole.whole, bytes.dispatch + bytes.combine);
  const Times apart = replays.time(steps, kReplays, true, plan_apart, combine);
  add("plan, dispatch", apart.first, bytes.dispatch);
  rank.checked_step();
  meeting.meet();
}

bool run_shape(RanksAs ranks_as, const Shape& shape, const Results& results) {
  try {
    if (ranks_as == RanksAs::threads) {
      CUDA_OK(cudaSetDevice(0));
      cudaStream_t stream = nullptr;
      CUDA_OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
      run_threads(shape.ranks, [&](Group& group) {
        CUDA_OK(cudaSetDevice(0));
        time_shape(group, 0, stream, ranks_as, shape, results);
      });
      CUDA_OK(cudaStreamDestroy(stream));
      return true;
    }
    run_processes(shape.ranks, [&](Group& group) {
      int devices = 1;
      CUDA_OK(cudaGetDeviceCount(&devices));
      const int ordinal = ranks_as == RanksAs::gpus ? group.rank() % devices : 0;
      CUDA_OK(cudaSetDevice(ordinal));
      cudaStream_t stream = nullptr;
      CUDA_OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
      time_shape(group, ordinal, stream, ranks_as, shape, results);
    });
    return true;
  } catch (const std::exception& error) {
    std::printf("FAILED %s %dx%d T%d H%d: %s\n", bench::name(ranks_as), shape.ranks, shape.num_sms,
                shape.tokens, shape.hidden, error.what());
    return false;
  }
}

Shape throughput(int ranks, int num_sms, int hidden = 7168, int topk = 8) {
  Shape shape;
  shape.ranks = ranks;
  shape.tokens = 4096;
  shape.hidden = hidden;
  shape.topk = topk;
  shape.experts = 256;
  shape.num_sms = num_sms;
  return shape;
}
Shape decode(int ranks, int tokens, int num_sms = 16) {
  Shape shape = throughput(ranks, num_sms);
  shape.tokens = tokens;
  shape.layout = Layout::slots;
  shape.reduction = Reduction::by_token;
  shape.e4m3 = true;
  return shape;
}
Shape grouped(int ranks, int num_sms, Reduction reduction, SumAt sum_at) {
  Shape shape = throughput(ranks, num_sms);
  shape.layout = Layout::grouped;
  shape.reduction = reduction;
  shape.sum_at = sum_at;
  shape.depth = 1;
  return shape;
}

std::vector<Shape> shapes_of(RanksAs ranks_as, const std::string& which) {
  const bool quick = which == "quick";
  std::vector<Shape> shapes;
  const bool only_decode = which == "decode";
  if (only_decode && ranks_as != RanksAs::gpus) {
    for (const int tokens : {128, 16, 1}) shapes.push_back(decode(8, tokens));
    return shapes;
  }
  if (ranks_as == RanksAs::gpus) {
    // Asked in a process of its own: this one must not touch CUDA before it forks.
    int devices = 0;
    const int status =
        std::system("exit $(nvidia-smi --query-gpu=name --format=csv,noheader | wc -l)");
    devices = WEXITSTATUS(status);
    for (const int num_sms : {4, 8, 16, 24, 32, 64}) {
      if (only_decode || (quick && num_sms != 16 && num_sms != 24)) continue;
      shapes.push_back(throughput(devices, num_sms));
    }
    if (quick) return shapes;
    for (const int num_sms : {16, 24}) {
      if (only_decode) continue;
      shapes.push_back(grouped(devices, num_sms, Reduction::by_rank, SumAt::expert));
    }
    // Rows in 8 bits on their way out.
    for (const int num_sms : {8, 16, 24, 64}) {
      if (only_decode) continue;
      Shape shape = throughput(devices, num_sms);
      shape.e4m3 = true;
      shapes.push_back(shape);
    }
    for (const int num_sms : {16, 64}) {
      for (const int tokens : {128, 16, 1}) shapes.push_back(decode(devices, tokens, num_sms));
      // The same tokens with one row home for each (token, rank).
      Shape by_rank = decode(devices, 128, num_sms);
      by_rank.reduction = Reduction::by_rank;
      by_rank.sum_at = SumAt::expert;
      shapes.push_back(by_rank);
    }
    return shapes;
  }
  for (const auto& [ranks, num_sms] :
       {std::pair{8, 16}, {8, 8}, {8, 4}, {4, 32}, {4, 24}, {4, 16}}) {
    shapes.push_back(throughput(ranks, num_sms));
    if (quick) break;
  }
  for (const int tokens : {128, 16, 1}) shapes.push_back(decode(8, tokens));
  if (quick) return shapes;
  shapes.push_back(grouped(8, 16, Reduction::by_rank, SumAt::home));
  shapes.push_back(grouped(8, 16, Reduction::by_rank, SumAt::expert));
  shapes.push_back(grouped(8, 16, Reduction::by_token, SumAt::home));
  if (ranks_as == RanksAs::processes) return shapes;
  for (const int hidden : {2880, 3584, 2056, 2050}) shapes.push_back(throughput(8, 16, hidden));
  for (const int topk : {1, 6, 9, 12}) shapes.push_back(throughput(8, 16, 7168, topk));
  Shape copied = throughput(8, 16);
  copied.kernels = "cuda_copy";
  shapes.push_back(copied);
  return shapes;
}

int run(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  const std::string how = argc > 2 ? argv[2] : "";
  const RanksAs ranks_as = how == "threads" ? RanksAs::threads
                           : how == "gpus"  ? RanksAs::gpus
                                            : RanksAs::processes;
  if (how != bench::name(ranks_as) && how != "gpus") {
    std::fprintf(stderr, "usage: gpu_bench FILE.json processes|threads|gpus [quick|decode]\n");
    return 2;
  }
  std::string command = "gpu_bench " + std::filesystem::path(argv[1]).filename().string();
  for (int i = 2; i < argc; ++i) command.append(" ").append(argv[i]);
  Results results(argv[1], command);
  bool good = true;
  if (ranks_as == RanksAs::gpus) results.measure_the_link();
  for (const Shape& shape : shapes_of(ranks_as, argc > 3 ? argv[3] : "")) {
    good = run_shape(ranks_as, shape, results) && good;
  }
  results.finish();
  return good ? 0 : 1;
}

}  // namespace

}  // namespace wherry::bench

int main(int argc, char** argv) { return wherry::bench::run(argc, argv); }
