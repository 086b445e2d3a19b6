#pragma once

// Asks a worker over its control service whether it answers and how far its loading is.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

namespace tandem {

struct LoadState {
  uint64_t loaded_bytes = 0;
  uint64_t total_bytes = 0;
  bool ready = false;
  std::string kernels;  // "avx512_vbmi"
  uint32_t threads = 0;
};

class WorkerProbe {
 public:
  enum class Kind { kGpuWorker, kExpertWorker };

  WorkerProbe(Kind kind, const std::string& address);
  ~WorkerProbe();

  // Nothing when the worker does not answer within `timeout_ms`. Thread-safe.
  std::optional<LoadState> Ask(int timeout_ms) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tandem
