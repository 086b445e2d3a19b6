// The socket half of handover.h: connecting, peer credentials, whole messages, descriptors.

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "common/base/status.h"
#include "common/shm/handover.h"

namespace tandem::shm {
namespace {

absl::Status SystemError(const char* what) {
  return absl::UnavailableError(absl::StrCat("link socket: ", what, ": ", std::strerror(errno)));
}

absl::StatusOr<sockaddr_un> AddressOf(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof(address.sun_path)) {
    return absl::InvalidArgumentError(absl::StrCat("link socket path must have 1 to ",
                                                   sizeof(address.sun_path) - 1, " bytes: ", path));
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  return address;
}

// Waits for `events`; DEADLINE_EXCEEDED when they do not come.
absl::Status Await(int fd, short events, Deadline deadline) {
  while (true) {
    const auto left =
        std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
    if (left.count() <= 0) return absl::DeadlineExceededError("link socket: the peer is silent");
    pollfd entry{.fd = fd, .events = events, .revents = 0};
    const int ready = poll(&entry, 1, static_cast<int>(std::min<int64_t>(left.count(), 60'000)));
    if (ready > 0) return absl::OkStatus();
    if (ready < 0 && errno != EINTR) return SystemError("poll");
  }
}

constexpr size_t kFdBytes = CMSG_SPACE(sizeof(int) * 4);

// Takes all descriptors out of `message`, so that none leaks; false when there is not exactly the
// one allowed.
bool TakeFds(msghdr* message, UniqueFd* first) {
  bool fine = (message->msg_flags & MSG_CTRUNC) == 0;
  for (cmsghdr* part = CMSG_FIRSTHDR(message); part != nullptr; part = CMSG_NXTHDR(message, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(part) + i * sizeof(int), sizeof(int));
      if (first->valid()) {
        close(fd);
        fine = false;
      } else {
        *first = UniqueFd(fd);
      }
    }
  }
  return fine;
}

}  // namespace

absl::StatusOr<UniqueFd> ListenUnix(const std::string& path) {
  ASSIGN_OR_RETURN(const sockaddr_un address, AddressOf(path));
  struct stat info;
  if (lstat(path.c_str(), &info) == 0) {
    if (!S_ISSOCK(info.st_mode)) {
      return absl::AlreadyExistsError(absl::StrCat("link socket: ", path, " is not a socket"));
    }
    unlink(path.c_str());
  }
  UniqueFd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.valid()) return SystemError("socket");
  // On Linux the mode of the socket's inode is taken over by the file that bind makes.
  fchmod(fd.get(), 0600);
  if (bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    return SystemError("bind");
  }
  chmod(path.c_str(), 0600);
  if (listen(fd.get(), 8) != 0) return SystemError("listen");
  return fd;
}

absl::StatusOr<UniqueFd> ConnectUnix(const std::string& path, Deadline deadline) {
  ASSIGN_OR_RETURN(const sockaddr_un address, AddressOf(path));
  UniqueFd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.valid()) return SystemError("socket");
  // A full backlog says EAGAIN: ask again until the deadline.
  while (connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    if (errno == EINTR) continue;
    if (errno != EAGAIN || std::chrono::steady_clock::now() >= deadline) {
      return SystemError("connect");
    }
    poll(nullptr, 0, 5);
  }
  return fd;
}

absl::StatusOr<UniqueFd> AcceptUnix(int listen_fd) {
  UniqueFd fd(accept4(listen_fd, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!fd.valid()) return SystemError("accept");
  return fd;
}

absl::StatusOr<pid_t> CheckPeer(int socket_fd) {
  ucred peer{};
  socklen_t bytes = sizeof(peer);
  if (getsockopt(socket_fd, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) != 0) {
    return SystemError("peer credentials");
  }
  if (peer.uid != geteuid() && peer.uid != 0) {
    return absl::PermissionDeniedError(
        absl::StrCat("link socket: the peer runs as user ", peer.uid));
  }
  return peer.pid;
}

absl::Status SendAll(int socket_fd, const void* data, size_t bytes, Deadline deadline) {
  const auto* at = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t sent = send(socket_fd, at, bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent > 0) {
      at += sent;
      bytes -= static_cast<size_t>(sent);
    } else if (errno == EAGAIN) {
      RETURN_IF_ERROR(Await(socket_fd, POLLOUT, deadline));
    } else if (errno != EINTR) {
      return SystemError("send");
    }
  }
  return absl::OkStatus();
}

absl::Status SendWithFd(int socket_fd, const void* data, size_t bytes, int fd, Deadline deadline) {
  iovec part{.iov_base = const_cast<void*>(data), .iov_len = bytes};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(header), &fd, sizeof(int));
  while (true) {
    const ssize_t sent = sendmsg(socket_fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent > 0) {
      // The descriptor went with the first byte.
      return SendAll(socket_fd, static_cast<const char*>(data) + sent,
                     bytes - static_cast<size_t>(sent), deadline);
    }
    if (errno == EAGAIN) {
      RETURN_IF_ERROR(Await(socket_fd, POLLOUT, deadline));
    } else if (errno != EINTR) {
      return SystemError("send");
    }
  }
}

absl::StatusOr<UniqueFd> ReceiveWithFd(int socket_fd, void* data, size_t bytes, Deadline deadline) {
  UniqueFd fd;
  auto* at = static_cast<char*>(data);
  while (bytes > 0) {
    iovec part{.iov_base = at, .iov_len = bytes};
    alignas(cmsghdr) char control[kFdBytes];
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    const ssize_t got = recvmsg(socket_fd, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    if (got < 0 && errno == EAGAIN) {
      RETURN_IF_ERROR(Await(socket_fd, POLLIN, deadline));
      continue;
    }
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return SystemError("receive");
    if (!TakeFds(&message, &fd)) {
      return absl::DataLossError("link socket: more than one descriptor came");
    }
    if (got == 0) return absl::UnavailableError("link socket: the peer closed in mid-message");
    at += got;
    bytes -= static_cast<size_t>(got);
  }
  return fd;
}

absl::Status ReceiveAll(int socket_fd, void* data, size_t bytes, Deadline deadline) {
  ASSIGN_OR_RETURN(const UniqueFd fd, ReceiveWithFd(socket_fd, data, bytes, deadline));
  if (fd.valid()) return absl::DataLossError("link socket: a descriptor came uninvited");
  return absl::OkStatus();
}

bool PeerHungUp(int socket_fd) {
  char byte;
  const ssize_t got = recv(socket_fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
  return got >= 0 || (errno != EAGAIN && errno != EINTR);
}

bool ProcessEnded(int pidfd) {
  pollfd entry{.fd = pidfd, .events = POLLIN, .revents = 0};
  return pidfd >= 0 && poll(&entry, 1, 0) > 0;
}

}  // namespace tandem::shm
