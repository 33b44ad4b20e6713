#include "wherry/group.hpp"

#include <utility>

#include "group/state.hpp"
#include "support/check.hpp"

namespace wherry {

Group Group::from_allgather(int rank, int size, AllgatherFn allgather) {
  const Error::Where where{Stage::startup, rank, -1};
  WHERRY_CHECK(size >= 1, ErrorCode::bad_argument, where, "size is {}; it must be at least 1",
               size);
  WHERRY_CHECK(rank >= 0 && rank < size, ErrorCode::bad_argument, where,
               "rank is {}; it must lie in 0..{}", rank, size - 1);
  WHERRY_CHECK(allgather != nullptr, ErrorCode::bad_argument, where, "allgather is empty");
  auto state = std::make_shared<detail::GroupState>();
  state->rank = rank;
  state->size = size;
  state->allgather = std::move(allgather);
  return Group(std::move(state));
}

int Group::rank() const noexcept { return state_->rank; }
int Group::size() const noexcept { return state_->size; }

std::vector<Group::Bytes> Group::allgather(std::span<const std::byte> mine) const {
  std::vector<Bytes> all = state_->allgather(mine);
  WHERRY_CHECK(all.size() == static_cast<std::size_t>(size()), ErrorCode::bad_argument,
               (Error::Where{Stage::group, rank(), -1}), "allgather returned {} parts for {} ranks",
               all.size(), size());
  return all;
}

void Group::barrier() const { static_cast<void>(allgather({})); }

}  // namespace wherry
