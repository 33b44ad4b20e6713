#include "group/start.hpp"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>

#include "group/state.hpp"
#include "support/check.hpp"
#include "support/host.hpp"

namespace wherry {

namespace {

struct Launcher {
  const char* rank;
  const char* size;
};
constexpr Launcher kLaunchers[] = {{"WHERRY_RANK", "WHERRY_SIZE"},
                                   {"RANK", "WORLD_SIZE"},  // torchrun
                                   {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"},
                                   {"PMI_RANK", "PMI_SIZE"},  // MPICH, Intel MPI
                                   {"SLURM_PROCID", "SLURM_NTASKS"}};
// What tells two launches of one user on one host apart.
constexpr const char* kJobs[] = {"WHERRY_JOB", "TORCHELASTIC_RUN_ID", "PMIX_NAMESPACE",
                                 "SLURM_JOB_ID"};

std::optional<int> number(const Environment& get, const char* name, int least, int most) {
  const char* const text = get(name);
  if (text == nullptr) return std::nullopt;
  int value = 0;
  const auto [stop, error] = std::from_chars(text, text + std::strlen(text), value);
  WHERRY_CHECK_ARGUMENT(
      error == std::errc() && *stop == 0 && value >= least && value <= most && *text != 0,
      Stage::startup, "{} is '{}'; it must be a whole number from {} to {}", name, text, least,
      most);
  return value;
}

}  // namespace

Start start_from(const Environment& get, const std::string& job) {
  constexpr int kMost = std::numeric_limits<int>::max();
  constexpr int kMostPort = 65535;
  Start start;
  const Launcher* found = nullptr;
  std::string names;
  for (const Launcher& launcher : kLaunchers) {
    names += fmt::format("{}{}", names.empty() ? "" : ", ", launcher.rank);
    if (found == nullptr && get(launcher.rank) != nullptr) found = &launcher;
  }
  WHERRY_CHECK_ARGUMENT(
      found != nullptr, Stage::startup,
      "the environment does not say which rank this is (none of {} is set): start "
      "with torchrun, mpirun or srun, or set WHERRY_RANK and WHERRY_SIZE",
      names);
  const std::optional<int> size = number(get, found->size, 1, kMost);
  WHERRY_CHECK_ARGUMENT(size.has_value(), Stage::startup,
                        "{} is set but {} is not: it says how many ranks there are", found->rank,
                        found->size);
  start.size = *size;
  start.rank = number(get, found->rank, 0, start.size - 1).value_or(0);
  if (start.size == 1) return start;

  const char* const host = get("MASTER_ADDR");
  if (host != nullptr && *host != 0) {
    const std::optional<int> own = number(get, "WHERRY_PORT", 1, kMostPort);
    const std::optional<int> master = number(get, "MASTER_PORT", 1, kMostPort - 1);
    WHERRY_CHECK_ARGUMENT(own || master, Stage::startup,
                          "MASTER_ADDR is '{}', but neither WHERRY_PORT nor MASTER_PORT is set",
                          host);
    // A launcher may hold MASTER_PORT itself.
    start.address = {host, own ? *own : *master + 1, {}};
    return start;
  }
  std::string key = job;
  for (const char* const name : kJobs) {
    if (const char* const value = get(name); value != nullptr && *value != 0) {
      key = value;
      break;
    }
  }
  start.address.name = fmt::format("wherry-store-{}-{}", geteuid(), key);
  return start;
}

Group Group::from_environment(Seconds deadline) {
  // Groups made one after the other meet at places of their own.
  static std::atomic<int> calls{0};
  Start start = start_from([](const char* name) { return std::getenv(name); },
                           fmt::format("ppid{}", getppid()));
  const int call = calls.fetch_add(1);
  if (start.address.host.empty()) start.address.name += fmt::format("-{}", call);
  const auto store = std::make_shared<Store>(start.rank, start.size, start.address, deadline);
  Group group =
      from_allgather(start.rank, start.size, [store](auto mine) { return store->allgather(mine); });
  // All have come, or all say who has not. On one host they may meet again, where rank 0 says.
  const std::string mine = host_identity() + "/" + detail::new_meeting();
  const auto all = group.allgather(std::as_bytes(std::span(mine)));
  const auto host_of = [](const std::string& text) { return text.substr(0, text.find('/')); };
  const auto text_of = [](const Bytes& bytes) {
    return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  };
  const bool one_host = std::ranges::all_of(
      all, [&](const Bytes& bytes) { return host_of(text_of(bytes)) == host_of(mine); });
  if (one_host) group.state().meeting = text_of(all[0]).substr(host_of(mine).size() + 1);
  return group;
}

}  // namespace wherry
