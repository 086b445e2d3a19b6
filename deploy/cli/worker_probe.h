#pragma once

// Asks a worker over its control service whether it answers and how far its loading is.

#include <cstdint>
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

enum class WorkerKind { kGpuWorker, kExpertWorker };

// Nothing when the worker does not answer within `timeout_ms`. Thread-safe. Its connection ends
// with the answer: one that nobody reads holds up the worker's own end until its grace is over.
std::optional<LoadState> ProbeWorker(WorkerKind kind, const std::string& address, int timeout_ms);

}  // namespace tandem
