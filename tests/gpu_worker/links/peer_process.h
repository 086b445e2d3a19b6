// A second real process for link tests: the link_peer helper binary, started by fork and exec, told
// what to do by lines on its standard input, answering by lines. Killed and reaped with the object.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>
#include <vector>

#include "common/shm/handover.h"
#include "common/shm/unique_fd.h"

namespace tandem::testing {

class PeerProcess {
 public:
  explicit PeerProcess(const std::vector<std::string>& arguments);
  ~PeerProcess();
  PeerProcess(const PeerProcess&) = delete;
  PeerProcess& operator=(const PeerProcess&) = delete;

  // Sends a line and returns the answer; empty when the process is gone.
  std::string Ask(const std::string& line);
  void Send(const std::string& line);
  std::string ReadLine();

  void Signal(int signal) const;
  // SIGKILL, and waits for the end.
  void Kill();

  pid_t pid() const { return pid_; }

 private:
  pid_t pid_ = -1;
  shm::UniqueFd to_;
  shm::UniqueFd from_;
  std::string buffer_;
};

// Tickets as text, for the helper's lines.
std::string TicketToText(const shm::LinkTicket& ticket);
std::optional<shm::LinkTicket> TicketFromText(const std::string& text);

}  // namespace tandem::testing
