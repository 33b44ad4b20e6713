#include "wherry/group.hpp"

#include <unistd.h>

#include <algorithm>
#include <random>
#include <utility>

#include "group/state.hpp"
#include "group/store.hpp"
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

Group Group::subgroup(std::span<const int> ranks, Seconds deadline) const {
  const Error::Where where{Stage::startup, rank(), -1};
  const std::string list = fmt::format("[{}]", fmt::join(ranks, " "));
  std::vector<int> sorted(ranks.begin(), ranks.end());
  std::ranges::sort(sorted);
  WHERRY_CHECK(!ranks.empty(), ErrorCode::bad_argument, where, "ranks is empty");
  WHERRY_CHECK(sorted.front() >= 0 && sorted.back() < size() &&
                   std::ranges::adjacent_find(sorted) == sorted.end(),
               ErrorCode::bad_argument, where,
               "ranks is {}; allowed are different ranks from 0 to {}", list, size() - 1);
  const auto own = std::ranges::find(ranks, rank());
  WHERRY_CHECK(own != ranks.end(), ErrorCode::bad_argument, where,
               "ranks is {}, but this is rank {}: only the ranks of a subgroup make it", list,
               rank());
  WHERRY_CHECK(
      !state_->meeting.empty(), ErrorCode::unsupported, where,
      "the ranks of this group have no place to meet (they are on several hosts, or it was "
      "made by from_allgather): make the subgroup as the group was made");
  std::vector<int> members(ranks.begin(), ranks.end());
  const int count = state_->subgroups[members]++;
  const auto subrank = static_cast<int>(own - ranks.begin());
  const auto subsize = static_cast<int>(ranks.size());
  // Short, for a socket's name has some 100 bytes; equal for the same list only.
  const std::size_t key =
      std::hash<std::string>{}(fmt::format("{} {} {}", state_->meeting, list, count));
  const std::string meeting = fmt::format("wherry-{}-{:016x}", geteuid(), key);
  const auto store =
      std::make_shared<Store>(subrank, subsize, StoreAddress{{}, 0, meeting}, deadline);
  Group group =
      from_allgather(subrank, subsize, [store](auto mine) { return store->allgather(mine); });
  detail::GroupState& state = group.state();
  state.meeting = meeting;
  for (const int member : members) {
    const auto at = static_cast<std::size_t>(member);
    state.beside.push_back(at < state_->beside.size() && state_->beside[at]);
  }
  group.barrier();  // all have come, or all say who has not
  return group;
}

std::string detail::new_meeting() {
  std::random_device random;
  return fmt::format("wherry-{}-{}-{:08x}{:08x}", geteuid(), getpid(), random(), random());
}

void Group::barrier() const { static_cast<void>(allgather({})); }

}  // namespace wherry
