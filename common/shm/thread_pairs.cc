#include "common/shm/thread_pairs.h"

#include <algorithm>

#include "common/base/check.h"

namespace tandem::shm {

std::vector<ThreadPair> MakePairs(Placement placement, const std::vector<int>& gpu_cpus,
                                  const std::vector<int>& expert_cpus) {
  TANDEM_CHECK(placement != Placement::kAuto);
  TANDEM_CHECK(!gpu_cpus.empty() && gpu_cpus.size() <= kMaxThreads);
  TANDEM_CHECK(!expert_cpus.empty() && expert_cpus.size() <= kMaxThreads);
  if (placement == Placement::kApart) return {ThreadPair{0, 0}};

  std::vector<ThreadPair> pairs;
  std::vector<bool> paired(expert_cpus.size(), false);
  for (size_t gpu = 0; gpu < gpu_cpus.size(); ++gpu) {
    size_t partner = expert_cpus.size();
    for (size_t i = 0; i < expert_cpus.size() && gpu_cpus[gpu] >= 0; ++i) {
      if (!paired[i] && expert_cpus[i] == gpu_cpus[gpu]) {
        partner = i;
        break;
      }
    }
    if (partner < expert_cpus.size()) paired[partner] = true;
    pairs.push_back({static_cast<uint16_t>(gpu), static_cast<uint16_t>(partner)});
  }
  for (size_t gpu = 0; gpu < gpu_cpus.size(); ++gpu) {
    if (pairs[gpu].expert < expert_cpus.size()) continue;
    pairs[gpu].expert = static_cast<uint16_t>(gpu % expert_cpus.size());
    paired[pairs[gpu].expert] = true;
  }
  for (size_t i = 0; i < expert_cpus.size(); ++i) {
    if (paired[i]) continue;
    pairs.push_back({static_cast<uint16_t>(i % gpu_cpus.size()), static_cast<uint16_t>(i)});
  }
  return pairs;
}

Placement ResolvePlacement(Placement wish, const std::vector<int>& gpu_cpus,
                           const std::vector<int>& expert_cpus, int online_cpus) {
  if (wish != Placement::kAuto) return wish;
  bool unpinned = false;
  for (const int cpu : gpu_cpus) {
    unpinned |= cpu < 0;
    if (cpu >= 0 && std::find(expert_cpus.begin(), expert_cpus.end(), cpu) != expert_cpus.end()) {
      return Placement::kColocated;
    }
  }
  for (const int cpu : expert_cpus) unpinned |= cpu < 0;
  const size_t threads = gpu_cpus.size() + expert_cpus.size();
  const bool crowded = unpinned && threads > static_cast<size_t>(online_cpus);
  return crowded ? Placement::kColocated : Placement::kApart;
}

namespace {

std::vector<uint32_t> PairsOf(const std::vector<ThreadPair>& pairs, uint16_t ThreadPair::*side,
                              int thread) {
  std::vector<uint32_t> indexes;
  for (size_t i = 0; i < pairs.size(); ++i) {
    if (pairs[i].*side == thread) indexes.push_back(static_cast<uint32_t>(i));
  }
  return indexes;
}

}  // namespace

std::vector<uint32_t> PairsOfGpu(const std::vector<ThreadPair>& pairs, int thread) {
  return PairsOf(pairs, &ThreadPair::gpu, thread);
}

std::vector<uint32_t> PairsOfExpert(const std::vector<ThreadPair>& pairs, int thread) {
  return PairsOf(pairs, &ThreadPair::expert, thread);
}

}  // namespace tandem::shm
