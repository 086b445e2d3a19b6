// Which gpu-worker thread and which expert thread share a doorbell.
//
// Co-located (both sides take turns on the same cores): each thread that has a partner on its own
// CPU is paired with it, so that ringing and then sleeping hands the core over without a wake-up
// across cores; a gpu thread without such a partner rings the expert thread of its index (modulo),
// an expert thread without one is rung by the gpu thread of its index. Every thread of both sides
// has a pair. Apart: one pair, thread 0 of both sides.
//
// Pure functions; both sides compute the same pairs from the thread lists of the handover, so that
// none need be trusted from the wire.
#pragma once

#include <cstdint>
#include <vector>

namespace tandem::shm {

inline constexpr uint32_t kMaxThreads = 512;  // of one side
inline constexpr uint32_t kMaxPairs = 2 * kMaxThreads;

enum class Placement : uint32_t {
  kAuto = 0,   // co-located when the sides share a CPU, or when unpinned threads outnumber the CPUs
  kApart = 1,  // own cores: spin, then sleep
  kColocated = 2,  // shared cores: sleep at once, woken by the partner on the same core
};

struct ThreadPair {
  uint16_t gpu = 0;
  uint16_t expert = 0;
  bool operator==(const ThreadPair&) const = default;
};

// Pair 0 belongs to gpu thread 0, which writes the slot header.
// REQUIRES: placement is not kAuto; 1 <= sizes <= kMaxThreads. A cpu of -1 matches none.
std::vector<ThreadPair> MakePairs(Placement placement, const std::vector<int>& gpu_cpus,
                                  const std::vector<int>& expert_cpus);

// Turns kAuto into one of the others. `online_cpus`: CPUs this process may use.
Placement ResolvePlacement(Placement wish, const std::vector<int>& gpu_cpus,
                           const std::vector<int>& expert_cpus, int online_cpus);

// Indexes of the pairs of one thread, ascending.
std::vector<uint32_t> PairsOfGpu(const std::vector<ThreadPair>& pairs, int thread);
std::vector<uint32_t> PairsOfExpert(const std::vector<ThreadPair>& pairs, int thread);

}  // namespace tandem::shm
