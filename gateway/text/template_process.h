#pragma once

// The parent's side of one helper process: starts it, exchanges frames with a deadline, kills it.
//
// Ownership: one thread starts, uses and destroys it, and must live as long as the helper is wanted
// (the kernel ends the helper with the thread that made it). Only pid() may be read by others.
// Errors: UNAVAILABLE when it cannot be started or has died, DEADLINE_EXCEEDED, RESOURCE_EXHAUSTED
// for a frame over its limit. After any error the process is dead and reaped.

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace tandem::gateway {

inline constexpr char kTemplateHelperFlag[] = "--template-helper";

class TemplateProcess {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;

  TemplateProcess() = default;
  ~TemplateProcess() { Kill(); }
  TemplateProcess(const TemplateProcess&) = delete;
  TemplateProcess& operator=(const TemplateProcess&) = delete;

  absl::Status Start(const std::string& binary);
  // Sends one frame and returns the next one. REQUIRES: running().
  absl::StatusOr<std::string> Exchange(std::string_view request, uint64_t reply_limit_bytes,
                                       TimePoint deadline);
  void Kill();

  bool running() const { return pid() != 0; }
  pid_t pid() const { return pid_.load(std::memory_order_relaxed); }

 private:
  absl::Status Send(std::string_view bytes, TimePoint deadline);
  absl::Status Receive(char* bytes, size_t size, TimePoint deadline);
  // Waits until the channel is ready for `events`.
  absl::Status Wait(short events, TimePoint deadline);
  absl::Status Failed(absl::Status status);

  std::atomic<pid_t> pid_{0};
  int channel_ = -1;
};

}  // namespace tandem::gateway
