// What link tests need around a link: a team of threads that makes SPMD calls, an expert worker in
// threads of this process, inputs from a seed, and a step that compares every result with the
// formula.
#pragma once

#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "expert_worker/link_loop.h"
#include "gpu_worker/expert_link.h"
#include "gpu_worker/links/shm_expert_link.h"
#include "tests/gpu_worker/links/fake_experts.h"

namespace tandem::testing {

inline constexpr uint64_t kModelHash = 0x1234567890abcdef;

// Limits of the tests' links.
shm::BatchLimits TestLimits();

// Socket path in a fresh private directory; removed with the object.
class TempSocketDir {
 public:
  TempSocketDir();
  ~TempSocketDir();
  std::string Socket(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

// Calls fn(thread) on `threads` new threads and returns when all are done.
void RunTeam(int threads, const std::function<void(int)>& fn);

// A LinkLoop over FakeExperts, its compute threads in this process.
class ExpertWorkerThreads {
 public:
  ExpertWorkerThreads(const std::string& socket_path, int threads, shm::Placement placement,
                      int worker = 0, Tracer* tracer = nullptr)
      : ExpertWorkerThreads(socket_path, std::vector<int>(static_cast<size_t>(threads), -1),
                            placement, worker, tracer) {}
  // `cpus` decide who is paired with whom; the threads are not pinned.
  ExpertWorkerThreads(const std::string& socket_path, const std::vector<int>& cpus,
                      shm::Placement placement, int worker, Tracer* tracer = nullptr);
  ~ExpertWorkerThreads();

  expert::LinkLoop& loop() { return *loop_; }
  FakeExperts& experts() { return experts_; }
  absl::StatusOr<shm::LinkTicket> Offer(const shm::BatchLimits& limits);

 private:
  FakeExperts experts_;
  std::unique_ptr<expert::LinkLoop> loop_;
  std::vector<std::thread> threads_;
};

gpu::ShmLinkOptions LinkOptions(const shm::LinkTicket& ticket, const shm::BatchLimits& limits,
                                int threads);

// Waits until `condition`, at most `seconds`; returns what it said last.
bool Eventually(const std::function<bool()>& condition, int seconds = 10);

// Descriptors of this process that are open now.
int OpenDescriptors();
// Mappings of this process whose name contains `text`.
int MappingsNamed(const std::string& text);

LinkInput RandomInput(std::mt19937_64* random, const shm::BatchLimits& limits, uint32_t lane,
                      uint32_t layer, int32_t rows, bool deferred);

// One step: for every layer, submits to each lane and then collects each, on a team of
// link->threads().
struct StepSpec {
  uint64_t step = 1;
  uint32_t layers = 4;
  std::vector<int32_t> rows_of_lane;
  bool deferred = false;
  int workers = 1;  // of the set: results are summed in worker order
};
// Returns EndStep's status; results are compared only when it is OK. `mismatches` counts wrong
// elements.
absl::Status RunStep(gpu::ExpertLink* link, const StepSpec& spec, uint64_t seed, int* mismatches);

}  // namespace tandem::testing
