#pragma once

// Hot experts: the busiest routed experts lie on the device. The step thread counts what was picked
// and decides (hot_policy.h); a thread of its own copies experts into slots; the table that says
// which expert lies where is switched between two steps.
//
//   hot->BeginStep();     // what was copied meanwhile becomes resident; victims' slots come free
//   ... the step reads residents() ...
//   hot->Count(moe_layer, picks) of every layer and counted row; hot->EndStep();
//
// A step never waits for a copy: what the two threads hand over lies behind a lock that the step
// thread only tries, and what it finds locked it does at the next step.
//
// A copy that fails (a worker is lost) is given up and copying pauses for kPauseSteps; residents
// stay where they are. Nothing is begun or streamed while the source is not available. Counts are
// written to the state directory every kSaveSteps and at the end; a file that cannot be used is
// logged and the start is a cold one.
//
// Copies are on the timeline's track "hot experts".
//
// Thread safety: counters() by any thread, all else by the step thread. Ownership: backend,
// source and tracer must outlive it. Steps allocate nothing.

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "common/base/trace.h"
#include "gpu_worker/backend.h"
#include "gpu_worker/hot_experts/expert_stream.h"
#include "gpu_worker/hot_experts/hot_policy.h"
#include "gpu_worker/resident_experts.h"

namespace tandem::gpu {

struct HotExpertsOptions {
  uint64_t model_hash = 0;
  int experts = 0;              // a layer
  std::vector<int> moe_layers;  // layers of the model that have routed experts, ascending
  bool stream_prompts = false;  // prefill streaming (expert_stream.h), if the slots allow it
  int fixed_streamed = -1;      // experts a layer, for comparison; -1: as measured
  std::string state_dir;        // empty: counts are lost with the process
  Tracer* tracer = nullptr;     // null: copies are not traced
  HotPolicy::Options policy;    // its shape is filled in
};

class HotExperts {
 public:
  // After a failed copy; a lost worker is back within seconds.
  static constexpr uint64_t kPauseSteps = 256;
  static constexpr uint64_t kSaveSteps = 4096;
  // Rows of a step that are counted, evenly spaced: a long prompt must not outweigh the decode
  // steps that follow it, nor cost more to count.
  static constexpr int kCountedRows = 64;

  struct Counters {
    uint64_t migrations = 0;
    uint64_t failed_copies = 0;
    uint64_t resident_experts = 0;
    uint64_t resident_bytes = 0;
    uint64_t slots = 0;
    uint64_t capacity_bytes = 0;  // of the slots
    uint64_t streamed_experts = 0;
  };

  // Slots for as many experts as shape.budget_bytes hold (max_slots is chosen here). Errors: the
  // backend's; INVALID_ARGUMENT when the budget holds no expert beside the spare slot, naming
  // the least that does.
  static absl::StatusOr<std::unique_ptr<HotExperts>> Create(Backend& backend, ResidentShape shape,
                                                            ExpertWeightSource& source,
                                                            const HotExpertsOptions& options);
  ~HotExperts();  // ends the copying, keeps the counts
  HotExperts(const HotExperts&) = delete;
  HotExperts& operator=(const HotExperts&) = delete;

  void BeginStep();
  void Count(int moe_layer, std::span<const uint16_t> picks) { policy_.Add(moe_layer, picks); }
  void EndStep();
  // Every how manyth row of a step is counted.
  static int CountedStride(int rows) { return (rows + kCountedRows - 1) / kCountedRows; }

  const Residents& residents() const { return residents_; }

  // Of a step with prompt rows, after BeginStep: what it streams; null: nothing.
  ExpertStream* BeginStream(int rows);
  // Of such a step, if it ended well.
  void ObserveStream(const StreamingTimes& times);
  Counters counters() const;

  // For tests, on the step thread: hands over what a step found locked, and returns when every copy
  // that was begun has ended and the copier waits; the next BeginStep finds it all.
  void WaitForCopies();

 private:
  struct Copy {
    Migration migration;
    bool ok = false;
  };

  HotExperts(Backend& backend, ExpertWeightSource& source, const HotExpertsOptions& options,
             std::unique_ptr<ResidentExperts> experts);
  absl::Status MakeTable();
  absl::Status MakeStream();
  void RestoreCounts();
  void SaveCounts(const ExpertCounts& counts) const;
  void Apply(const Copy& copy);
  void SetSlot(int moe_layer, int expert, uint16_t slot);
  void HandOver(bool save);
  void CopierMain();
  bool CopyExpert(const Migration& migration, CanonicalExpert* expert);

  Backend& backend_;
  ExpertWeightSource& source_;
  const HotExpertsOptions options_;
  const std::unique_ptr<ResidentExperts> experts_;
  HotPolicy policy_;
  std::unique_ptr<ExpertStream> stream_;  // null: prompts are not streamed
  Residents residents_;
  std::vector<uint16_t> table_;       // [MoE layers, experts]: what the device has, or is to have
  std::vector<uint8_t> table_dirty_;  // by MoE layer
  std::vector<Migration> planned_;    // not handed over yet
  std::vector<Copy> taken_;
  uint64_t paused_until_ = 0;  // in steps
  uint64_t next_save_ = kSaveSteps;

  std::mutex mutex_;  // of what follows; never held during a copy
  std::condition_variable wake_;
  std::condition_variable idle_;
  std::vector<Migration> queue_;
  std::vector<Copy> done_;
  bool copier_waits_ = false;
  ExpertCounts snapshot_;  // to be saved
  bool save_wanted_ = false;
  bool stopped_ = false;

  std::atomic<uint64_t> migrations_{0};
  std::atomic<uint64_t> failed_copies_{0};
  std::atomic<uint64_t> resident_{0};
  std::atomic<uint64_t> streamed_{0};
  TraceTrack* const track_;  // of the copier
  std::thread copier_;
};

}  // namespace tandem::gpu
