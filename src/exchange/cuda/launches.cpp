#include "exchange/cuda/launches.hpp"

#include <algorithm>
#include <chrono>
#include <utility>

#include "support/check.hpp"

namespace wherry::cuda {

Launches::Launches(std::vector<int> ranks, Seconds deadline)
    : ranks_(std::move(ranks)),
      deadline_(deadline),
      here_(ranks_.size(), false),
      done_(ranks_.size(), nullptr) {}

void Launches::together(const Call& call, Error::Where where,
                        const std::function<cudaError_t(std::byte*)>& launch) {
  const auto deadline = std::chrono::steady_clock::now() +
                        std::chrono::duration_cast<std::chrono::steady_clock::duration>(deadline_);
  std::unique_lock lock(mutex_);
  const std::uint64_t turn = turns_;
  if (arrived_ == 0) {
    table_.resize(call.table_bytes);
    kind_ = call.kind;
    stream_ = call.stream;
  }
  if (call.kind != kind_ || call.stream != stream_) {
    differs_ = true;
    launched_.notify_all();
  }
  const auto throw_if_broken = [&] {
    WHERRY_CHECK(!differs_, ErrorCode::misuse, where,
                 "ranks that are threads of one process make the same calls, in one stream, with "
                 "tensors of the same alignment; theirs differ");
    WHERRY_CHECK(
        missing_ < 0, ErrorCode::timeout, (Error::Where{where.stage, where.rank, missing_}),
        "rank {} did not make this call within {:g} s; ranks that are threads of one process "
        "on one GPU launch together",
        missing_, deadline_.count());
  };
  throw_if_broken();
  std::memcpy(table_.data() + static_cast<std::size_t>(call.local) * call.args_bytes, call.args,
              call.args_bytes);
  here_[static_cast<std::size_t>(call.local)] = true;
  done_[static_cast<std::size_t>(call.local)] = call.done;
  if (++arrived_ == num_ranks()) {
    result_ = launch(table_.data());
    if (result_ == cudaSuccess) result_ = record_beside(stream_, done_);
    arrived_ = 0;
    std::fill(here_.begin(), here_.end(), false);
    ++turns_;
    launched_.notify_all();
  } else if (!launched_.wait_until(lock, deadline,
                                   [&] { return turns_ != turn || differs_ || missing_ >= 0; })) {
    const auto absent = std::find(here_.begin(), here_.end(), false);
    missing_ = ranks_[static_cast<std::size_t>(absent - here_.begin())];
    launched_.notify_all();
  }
  if (turns_ == turn) throw_if_broken();
  check(result_, where, "launch");
}

}  // namespace wherry::cuda
