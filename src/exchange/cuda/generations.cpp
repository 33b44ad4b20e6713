// The generations of a window on a GPU, and whose turn it is: what the host knows of both, and what it has
// the device tell the peers.
#include <algorithm>

#include "exchange/cuda/exchange.hpp"
#include "kernels/cuda/launch.hpp"
#include "support/check.hpp"

namespace wherry::cuda {

namespace kernel = kernels::cuda;

CudaExchange::Generation* CudaExchange::oldest_uncombined(std::uint64_t plan_serial) noexcept {
  Generation* oldest = nullptr;
  if (windows_->shared && windows_->user != this) return nullptr;  // its rows are another's now
  for (Generation& g : generations_) {
    if (g.phase != Phase::received || g.plan_serial != plan_serial) continue;
    if (oldest == nullptr || g.step < oldest->step) oldest = &g;
  }
  return oldest;
}

void CudaExchange::tell(const kernel::TellArgs& args, Stage stage) {
  launches_->launch(local_, args, stream_, at(stage),
                    [](auto& table, int ranks, cudaStream_t stream) {
                      return kernel::launch_tell(table, ranks, stream);
                    });
}

bool CudaExchange::in_flight() const noexcept {
  return std::ranges::any_of(generations_, [](const Generation& g) {
    return g.phase == Phase::sending || g.phase == Phase::combining;
  });
}

void CudaExchange::take_window() {
  MappedWindows& windows = *windows_;
  if (!windows.shared) return;
  cudaStreamCaptureStatus status{};
  unsigned long long capture = 0;
  cuda::check(cudaStreamGetCaptureInfo(stream_, &status, &capture), at(Stage::dispatch_send),
              "cudaStreamGetCaptureInfo");
  const bool captures = status == cudaStreamCaptureStatusActive;
  const bool mine = windows.user == this;
  // Graphs run when they like: each takes its turn itself, and once there are any, so does each call.
  if (mine && (captures ? capture == windows.capture : !windows.captured)) return;
  WHERRY_CHECK(mine || windows.user == nullptr || !windows.user->in_flight(), ErrorCode::misuse,
               at(Stage::dispatch_send),
               "another exchange of this window has a dispatch or combine in flight");
  if (captures) {
    windows.captured = true;
    windows.capture = capture;
  }
  if (windows.used || captures) {
    kernel::TellArgs handover{};
    handover.context = context_;
    handover.channel = layout::Channel::handover;
    handover.send = handover.receive = true;
    tell(handover, Stage::dispatch_send);
  }
  windows.user = this;
  windows.used = true;
  if (mine) return;
  // What this exchange had received before the others' turns is overwritten.
  for (Generation& g : generations_) {
    if (g.phase == Phase::received) g.phase = Phase::lost;
  }
}

CudaExchange::Generation& CudaExchange::enter() {
  const std::uint64_t step = steps_ + 1;
  Generation& g = at_step(step);
  WHERRY_CHECK(g.phase != Phase::sending && g.phase != Phase::combining, ErrorCode::misuse,
               at(Stage::dispatch_send),
               "step {} needs the generation of step {}, whose {} has not finished; depth is {}",
               step, g.step, g.phase == Phase::sending ? "dispatch" : "combine", config().depth);
  take_window();
  // Paired use frees itself (design 5.4). Otherwise every rank says that it is done (5.6).
  if (g.phase == Phase::received || g.phase == Phase::released || g.phase == Phase::lost) {
    kernel::TellArgs credits{};
    credits.context = context_;
    credits.channel = layout::Channel::credit;
    credits.generation = generation_of(step);
    credits.send = g.phase != Phase::released;
    credits.receive = true;
    tell(credits, Stage::dispatch_send);
  }
  steps_ = step;
  g.step = step;
  return g;
}

void CudaExchange::release(const Received& received) {
  const DeviceGuard guard(device_.ordinal);
  throw_if_failed();
  WHERRY_CHECK(received.step >= 1 && received.step <= steps_, ErrorCode::misuse, at(Stage::release),
               "step {} is not a dispatch of this exchange", received.step);
  Generation& g = at_step(received.step);
  WHERRY_CHECK(g.step == received.step && g.phase == Phase::received, ErrorCode::misuse,
               at(Stage::release),
               "the rows of step {} are not held: it was combined, released or overwritten already",
               received.step);
  kernel::TellArgs credits{};
  credits.context = context_;
  credits.channel = layout::Channel::credit;
  credits.generation = generation_of(received.step);
  credits.send = true;
  tell(credits, Stage::release);
  g.phase = Phase::released;
}

}  // namespace wherry::cuda
