#include "tests/gpu_worker/links/peer_process.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <sstream>

#include "common/base/check.h"

namespace tandem::testing {

PeerProcess::PeerProcess(const std::vector<std::string>& arguments) {
  int to[2], from[2];
  TANDEM_CHECK(pipe2(to, O_CLOEXEC) == 0 && pipe2(from, O_CLOEXEC) == 0);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, to[0], 0);
  posix_spawn_file_actions_adddup2(&actions, from[1], 1);
  std::vector<std::string> words = {LINK_PEER_PATH};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  TANDEM_CHECK(posix_spawn(&pid_, LINK_PEER_PATH, &actions, nullptr, argv.data(), environ) == 0);
  posix_spawn_file_actions_destroy(&actions);
  close(to[0]);
  close(from[1]);
  to_ = shm::UniqueFd(to[1]);
  from_ = shm::UniqueFd(from[0]);
  signal(SIGPIPE, SIG_IGN);
}

PeerProcess::~PeerProcess() { Kill(); }

void PeerProcess::Signal(int signal) const {
  if (pid_ > 0) kill(pid_, signal);
}

void PeerProcess::Kill() {
  if (pid_ <= 0) return;
  kill(pid_, SIGKILL);
  waitpid(pid_, nullptr, 0);
  pid_ = -1;
}

void PeerProcess::Send(const std::string& line) {
  const std::string text = line + "\n";
  [[maybe_unused]] const ssize_t sent = write(to_.get(), text.data(), text.size());
}

std::string PeerProcess::ReadLine() {
  while (true) {
    const size_t end = buffer_.find('\n');
    if (end != std::string::npos) {
      std::string line = buffer_.substr(0, end);
      buffer_.erase(0, end + 1);
      return line;
    }
    pollfd entry{.fd = from_.get(), .events = POLLIN, .revents = 0};
    char bytes[512];
    if (poll(&entry, 1, 30'000) <= 0) return "";
    const ssize_t got = read(from_.get(), bytes, sizeof(bytes));
    if (got <= 0) return "";
    buffer_.append(bytes, static_cast<size_t>(got));
  }
}

std::string PeerProcess::Ask(const std::string& line) {
  Send(line);
  return ReadLine();
}

std::string TicketToText(const shm::LinkTicket& ticket) {
  std::ostringstream text;
  text << ticket.socket_path << ' ' << ticket.epoch << ' ' << ticket.segment_bytes;
  for (const uint8_t byte : ticket.nonce) text << ' ' << int{byte};
  return text.str();
}

std::optional<shm::LinkTicket> TicketFromText(const std::string& text) {
  std::istringstream in(text);
  shm::LinkTicket ticket;
  in >> ticket.socket_path >> ticket.epoch >> ticket.segment_bytes;
  for (uint8_t& byte : ticket.nonce) {
    int value = 0;
    in >> value;
    byte = static_cast<uint8_t>(value);
  }
  if (!in) return std::nullopt;
  return ticket;
}

}  // namespace tandem::testing
