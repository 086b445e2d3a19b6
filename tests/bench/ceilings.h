#pragma once

// What this machine can do at most, measured by small loops: bytes read from memory a second, and
// operations of each instruction a second. Benchmarks state their results as shares of these.
//
// All functions run on the caller's pool and are called by its thread 0; not thread-safe.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "common/hw/cpu_features.h"
#include "expert_worker/engine/pool.h"
#include "tests/bench/peak_probes.h"

namespace tandem::bench {

struct ReadCeiling {
  std::string pages;  // "4 KiB" or "2 MiB"
  int threads = 1;
  double median_gbps = 0;
  double best_gbps = 0;
};

struct PeakCeiling {
  const PeakProbe* probe = nullptr;
  double one_thread_gops = 0;
  double all_threads_gops = 0;
};

struct Ceilings {
  std::vector<ReadCeiling> reads;
  std::vector<PeakCeiling> peaks;  // of the instructions that this machine has
};

// `read_bytes`: of the buffer that is read, many times the largest cache.
Ceilings MeasureCeilings(expert::Pool& pool, const CpuFeatures& features, uint64_t read_bytes);

// Operations a second (1e9) of all threads of the pool together over some `seconds`.
double PeakGops(expert::Pool& pool, const PeakProbe& probe, double seconds);

struct ByteRange {
  const void* data = nullptr;
  uint64_t bytes = 0;
};

// Time in which the pool's threads read `ranges` with plain loads: pieces are claimed in order, as
// a kernel's tasks are.
double ReadSeconds(expert::Pool& pool, std::span<const ByteRange> ranges);

}  // namespace tandem::bench
