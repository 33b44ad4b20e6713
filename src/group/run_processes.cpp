#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "group/bind.hpp"
#include "group/board.hpp"
#include "group/state.hpp"
#include "support/check.hpp"
#include "wherry/group.hpp"

namespace wherry {

namespace {

// The life of a forked rank; never returns to the caller's stack.
[[noreturn]] void run_child(Board& board, int rank, pid_t parent, const std::string& meeting,
                            const std::function<void(Group&)>& fn, const RunOptions& options) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(1);  // the parent died before prctl
  // Ctrl-C reaches the whole foreground group: the parent decides, the children are ended by it.
  if (options.cancelled != nullptr) signal(SIGINT, SIG_IGN);
  int status = 0;
  try {
    std::vector<bool> beside = bind_rank(rank, board.ranks());
    Group group = Group::from_allgather(rank, board.ranks(), [&board, rank, &options](auto mine) {
      return board.allgather(rank, mine, options.deadline);
    });
    group.state().beside = std::move(beside);
    group.state().meeting = meeting;
    fn(group);
  } catch (const Error& error) {
    board.report(rank, error);
    status = 1;
  } catch (const std::bad_alloc&) {
    board.report(
        rank, Error(ErrorCode::out_of_memory, {Stage::none, rank, -1}, "memory allocation failed"));
    status = 1;
  } catch (const std::exception& error) {
    board.report(rank, Error(ErrorCode::internal, {Stage::none, rank, -1}, error.what()));
    status = 1;
  }
  board.leave(rank);
  std::fflush(nullptr);
  _exit(status);
}

// The forked ranks: kills and reaps whatever is left when it goes out of scope.
class Children {
 public:
  explicit Children(Board& board) : board_(board) {}
  ~Children() {
    kill_all();
    while (running_ > 0) reap(true);
  }
  Children(const Children&) = delete;
  Children& operator=(const Children&) = delete;

  void add(pid_t pid) {
    pids_.push_back(pid);
    fds_.push_back({static_cast<int>(syscall(SYS_pidfd_open, pid, 0)), POLLIN, 0});
    ++running_;
  }
  [[nodiscard]] int running() const noexcept { return running_; }
  void kill_all() {
    for (const pid_t pid : pids_) {
      if (pid > 0) kill(pid, SIGKILL);
    }
  }
  // Sleeps until a child ends, a signal comes or 100 ms have passed; then reaps.
  void wait() {
    poll(fds_.data(), fds_.size(), 100);
    reap(false);
  }

 private:
  void reap(bool block) {
    for (std::size_t rank = 0; rank < pids_.size(); ++rank) {
      if (pids_[rank] <= 0) continue;
      int status = 0;
      if (waitpid(pids_[rank], &status, block ? 0 : WNOHANG) != pids_[rank]) continue;
      pids_[rank] = 0;
      if (fds_[rank].fd >= 0) close(fds_[rank].fd);
      fds_[rank].fd = -1;  // poll ignores it
      --running_;
      const int at = static_cast<int>(rank);
      if (WIFSIGNALED(status)) {
        board_.report(at, Error(ErrorCode::peer_failed, {Stage::none, at, at},
                                fmt::format("rank {} was killed by signal {} ({})", rank,
                                            WTERMSIG(status), strsignal(WTERMSIG(status)))));
      } else if (WEXITSTATUS(status) != 0) {
        board_.report(
            at, Error(ErrorCode::peer_failed, {Stage::none, at, at},
                      fmt::format("rank {} exited with status {}", rank, WEXITSTATUS(status))));
      }
      board_.leave(at);
    }
  }

  Board& board_;
  std::vector<pid_t> pids_;
  std::vector<pollfd> fds_;
  int running_ = 0;
};

}  // namespace

void run_processes(int ranks, const std::function<void(Group&)>& fn, const RunOptions& options) {
  WHERRY_CHECK_ARGUMENT(ranks >= 1, Stage::startup, "ranks is {}; it must be at least 1", ranks);
  Board board(ranks);
  const std::string meeting = detail::new_meeting();
  std::fflush(nullptr);  // or buffered output would be printed once per child
  const pid_t parent = getpid();
  bool cancelled = false;
  {
    Children children(board);
    for (int rank = 0; rank < ranks; ++rank) {
      const pid_t pid = fork();
      WHERRY_CHECK(pid >= 0, ErrorCode::system, (Error::Where{Stage::startup, rank, -1}),
                   "fork of rank {}: {}", rank, std::strerror(errno));
      if (pid == 0) run_child(board, rank, parent, meeting, fn, options);
      children.add(pid);
    }
    // After the first failure the others get the time that their own waits may take, no more: a rank
    // that is stopped would otherwise keep its launcher forever.
    std::optional<Clock::time_point> give_up;
    while (children.running() > 0 && !cancelled && !(give_up && Clock::now() >= *give_up)) {
      children.wait();
      cancelled = options.cancelled != nullptr && options.cancelled->load();
      if (!give_up && board.first_error()) {
        give_up = Clock::now() +
                  std::chrono::duration_cast<Clock::duration>(options.deadline + Seconds(1));
      }
    }
  }
  if (cancelled)
    throw Error(ErrorCode::interrupted, {Stage::none, -1, -1}, "interrupted; the ranks were ended");
  if (const auto error = board.first_error()) throw *error;
}

}  // namespace wherry
