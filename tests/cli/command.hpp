// Runs build/bin/wherry as a user would, and looks at what it leaves: exit code, both outputs,
// processes. Needs no shell.
#pragma once

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace wherry::test {

struct Finished {
  int code = -1;  // exit code, or 128 + signal
  std::string out, err;
  double seconds = 0.0;

  // stdout, which must be one JSON object on one line and nothing else.
  [[nodiscard]] nlohmann::json json() const {
    if (out.empty() || out.find('\n') != out.size() - 1) {
      throw std::runtime_error("stdout is not one line: '" + out + "', stderr: '" + err + "'");
    }
    return nlohmann::json::parse(out);
  }
};

inline double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// A running command. What its ranks leave as orphans comes to this process, so that it can be seen.
class Command {
 public:
  // `stdout_path`: where stdout goes; empty: to us.
  explicit Command(std::vector<std::string> arguments, const std::string& stdout_path = {}) {
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    if (pipe2(out_.data(), O_CLOEXEC) != 0 || pipe2(err_.data(), O_CLOEXEC) != 0) {
      throw std::runtime_error("pipe");
    }
    arguments.insert(arguments.begin(), WHERRY_COMMAND);
    std::vector<char*> argv;
    argv.reserve(arguments.size() + 1);
    for (std::string& argument : arguments) argv.push_back(argument.data());
    argv.push_back(nullptr);
    started_ = now();
    pid_ = fork();
    if (pid_ == 0) {
      const int out = stdout_path.empty() ? out_[1] : open(stdout_path.c_str(), O_WRONLY);
      dup2(out, STDOUT_FILENO);
      dup2(err_[1], STDERR_FILENO);
      execv(argv[0], argv.data());
      _exit(127);
    }
    close(out_[1]);
    close(err_[1]);
  }
  ~Command() {
    if (!waited_) {
      kill(pid_, SIGKILL);
      waitpid(pid_, nullptr, 0);
    }
    close(out_[0]);
    close(err_[0]);
  }
  Command(const Command&) = delete;
  Command& operator=(const Command&) = delete;

  [[nodiscard]] pid_t pid() const noexcept { return pid_; }

  // Its child processes, once there are `count` of them.
  [[nodiscard]] std::vector<pid_t> children(std::size_t count) const {
    const std::string path =
        "/proc/" + std::to_string(pid_) + "/task/" + std::to_string(pid_) + "/children";
    for (const double start = now(); now() - start < 20.0;) {
      std::vector<pid_t> pids;
      if (FILE* file = std::fopen(path.c_str(), "r")) {
        for (int pid = 0; std::fscanf(file, "%d", &pid) == 1;) pids.push_back(pid);
        std::fclose(file);
      }
      if (pids.size() >= count) return pids;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    throw std::runtime_error("the command did not start its ranks");
  }

  Finished wait() {
    Finished result;
    std::array<pollfd, 2> fds{{{out_[0], POLLIN, 0}, {err_[0], POLLIN, 0}}};
    for (int open = 2; open > 0;) {
      poll(fds.data(), fds.size(), -1);
      for (std::size_t i = 0; i < fds.size(); ++i) {
        if (fds[i].fd < 0 || fds[i].revents == 0) continue;
        std::array<char, 4096> buffer;
        const ssize_t count = read(fds[i].fd, buffer.data(), buffer.size());
        if (count > 0) {
          (i == 0 ? result.out : result.err).append(buffer.data(), static_cast<std::size_t>(count));
        } else {
          fds[i].fd = -1;
          --open;
        }
      }
    }
    int status = 0;
    waitpid(pid_, &status, 0);
    waited_ = true;
    result.code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    result.seconds = now() - started_;
    return result;
  }

 private:
  std::array<int, 2> out_{}, err_{};
  pid_t pid_ = -1;
  bool waited_ = false;
  double started_ = 0.0;
};

inline Finished wherry(std::vector<std::string> arguments, const std::string& stdout_path = {}) {
  return Command(std::move(arguments), stdout_path).wait();
}

// Splits at spaces.
inline std::vector<std::string> words(const std::string& text) {
  std::vector<std::string> result(1);
  for (const char c : text) {
    if (c != ' ') {
      result.back() += c;
    } else if (!result.back().empty()) {
      result.emplace_back();
    }
  }
  if (result.back().empty()) result.pop_back();
  return result;
}

}  // namespace wherry::test
