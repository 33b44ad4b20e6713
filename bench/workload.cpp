#include "workload.hpp"

#include <cmath>
#include <cstring>
#include <new>
#include <numeric>
#include <random>
#include <utility>

namespace wherry::bench {

namespace {

constexpr std::int64_t kLine = 64;
constexpr std::int64_t kPage = 4096;

}  // namespace

int Shape::rank_of(int expert) const noexcept {
  const int share = experts / ranks;
  const int larger = experts % ranks;  // ranks that hold one more
  const int in_larger = larger * (share + 1);
  return expert < in_larger ? expert / (share + 1) : larger + (expert - in_larger) / share;
}

Rows::Rows(std::int64_t rows, std::int64_t row_bytes)
    : rows_(rows),
      pitch_((row_bytes + kLine - 1) / kLine * kLine) {
  const std::int64_t bytes = (rows * pitch_ + kPage - 1) / kPage * kPage + kPage;
  memory_.reset(
      static_cast<std::byte*>(std::aligned_alloc(kPage, static_cast<std::size_t>(bytes))));
  if (memory_ == nullptr) throw std::bad_alloc();
  fill(0);
}

void Rows::fill(int byte) {
  if (rows_ > 0) std::memset(memory_.get(), byte, static_cast<std::size_t>(rows_ * pitch_));
}

Workload make_workload(const Shape& shape, int rank) {
  Workload work;
  work.x = Rows(shape.tokens, shape.row_bytes());
  std::mt19937 random(shape.seed * 1000003U + static_cast<unsigned>(rank));
  for (std::int64_t token = 0; token < shape.tokens; ++token) {
    std::uint16_t* const x = work.x.row(token);
    for (std::int64_t h = 0; h < shape.hidden; ++h) {
      x[h] = narrow(static_cast<float>(static_cast<int>(random() % 4001) - 2000) / 1024.0F);
    }
  }
  std::vector<std::int32_t> experts(static_cast<std::size_t>(shape.experts));
  std::iota(experts.begin(), experts.end(), 0);
  for (std::int64_t token = 0; token < shape.tokens; ++token) {
    for (unsigned k = 0; k < static_cast<unsigned>(shape.topk); ++k) {
      const auto other = k + random() % (static_cast<unsigned>(shape.experts) - k);
      std::swap(experts[k], experts[other]);
      work.ids.push_back(experts[k]);
      work.weights.push_back(static_cast<float>(64 + random() % 1024) / 4096.0F);
    }
  }
  return work;
}

std::vector<std::uint16_t> dense_token(const Shape& shape, const Workload& work, Experts experts,
                                       Sum sum, std::int64_t token, const Travel& travel) {
  const auto hidden = static_cast<std::size_t>(shape.hidden);
  std::vector<std::uint16_t> x(work.x.row(token), work.x.row(token) + shape.hidden);
  if (travel.out) travel.out(x);
  const auto first = static_cast<std::size_t>(token * shape.topk);
  std::vector<float> y(hidden);
  // acc += what the choices served by `rank` contribute (by all ranks for -1); whether any did.
  const auto add_choices = [&](int rank, std::vector<float>& acc) {
    bool any = false;
    for (std::size_t at = first; at < first + static_cast<std::size_t>(shape.topk); ++at) {
      const std::int32_t slot = work.ids[at];
      if (rank >= 0 && shape.rank_of(slot) != rank) continue;
      any = true;
      for (std::size_t h = 0; h < hidden; ++h) y[h] = widen(expert_value(experts, slot, x[h]));
      if (sum == Sum::by_token && travel.home) travel.home(y);
      for (std::size_t h = 0; h < hidden; ++h) acc[h] = std::fma(work.weights[at], y[h], acc[h]);
    }
    return any;
  };
  std::vector<float> total(hidden, 0.0F);
  if (sum == Sum::by_token) {
    static_cast<void>(add_choices(-1, total));
  } else {
    for (int rank = 0; rank < shape.ranks; ++rank) {
      std::vector<float> partial(hidden, 0.0F);
      if (!add_choices(rank, partial)) continue;
      if (!travel.home || travel.rounds_first) {
        for (float& value : partial) value = widen(narrow(value));
      }
      if (travel.home) travel.home(partial);
      for (std::size_t h = 0; h < hidden; ++h) total[h] += partial[h];
    }
  }
  std::vector<std::uint16_t> result(hidden);
  for (std::size_t h = 0; h < hidden; ++h) result[h] = narrow(total[h]);
  return result;
}

}  // namespace wherry::bench
