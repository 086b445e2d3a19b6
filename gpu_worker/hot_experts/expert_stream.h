#pragma once

// Prefill streaming: in a step of many rows some of each layer's experts are copied to the device
// just for that layer, the next layer's while this one is computed, and the workers are left with
// the rest. How many is the planner's to say (streaming_planner.h); which: the busiest of those
// that are not resident, since they save the workers most for the same copy.
//
// The copies go to a ring of layer slots behind the slots of hot experts, so the op that computes
// resident experts computes them too; only the table differs. Two layer slots do: layer n + 1 is
// copied into one while n is read from the other, and must wait until n - 1 was.
//
//   Begin  ->  BeginLayer(0), ops of layer 0 with WaitForLayer before its residents, EndLayer(0),
//   BeginLayer(1) ...  ->  Download  ->  Synchronize  ->  Observe
//
// Thread safety: one thread enqueues. Ownership: backend, slots and source must outlive it. Steps
// allocate nothing. Errors: those of Create; a source that cannot be read fails the step.

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "gpu_worker/backend.h"
#include "gpu_worker/hot_experts/expert_counts.h"
#include "gpu_worker/hot_experts/streaming_planner.h"
#include "gpu_worker/resident_experts.h"

namespace tandem::gpu {

class ExpertStream {
 public:
  static constexpr int kRingLayers = 2;

  struct Options {
    int experts = 0;              // a layer
    std::vector<int> moe_layers;  // of the model
    int first_slot = 0;           // of the ring
    int layer_slots = 0;          // experts that one layer slot holds
    int fixed = -1;               // as StreamingPlanner::Options
  };
  static absl::StatusOr<std::unique_ptr<ExpertStream>> Create(Backend& backend,
                                                              ResidentExperts& experts,
                                                              ExpertWeightSource& source,
                                                              const Options& options);

  // Of a step with prompt rows, before its ops. `table` [MoE layers, experts] says who is resident.
  // False: nothing is streamed, nothing else is to be called but Observe.
  bool Begin(int rows, std::span<const uint16_t> table, const ExpertCounts& counts);
  const Residents& residents() const { return residents_; }
  int streamed() const { return streamed_; }

  void BeginLayer(int moe_layer);
  void WaitForLayer();
  void EndLayer();
  void Download();
  // Of a step that ended well: the times but for the copies', which are known here.
  void Observe(StreamingTimes times);
  // What one layer's copies did in such a step, in the device's time, ns.
  struct LayerCopies {
    int experts = 0;
    uint64_t bytes = 0;
    int64_t copy_begin = 0;
    int64_t copy_end = 0;
    int64_t wait_begin = 0;  // the compute stream, for the copies
    int64_t wait_end = 0;
  };
  LayerCopies copies(size_t moe_layer) const;

  const StreamingPlanner& planner() const { return planner_; }

 private:
  // As LayerCopies; device memory.
  struct Stamps {
    int64_t copy_begin = 0;
    int64_t copy_end = 0;
    int64_t wait_begin = 0;
    int64_t wait_end = 0;
  };

  ExpertStream(Backend& backend, ResidentExperts& experts, ExpertWeightSource& source,
               const Options& options);
  int FirstSlot(int moe_layer) const;
  void ChooseExperts(int moe_layer, const ExpertCounts& counts);
  void EnqueueCopies(int moe_layer);

  Backend& backend_;
  ResidentExperts& experts_;
  ExpertWeightSource& source_;
  const Options options_;
  StreamingPlanner planner_;
  Residents residents_;
  std::vector<uint16_t> table_;   // of the step
  std::vector<uint16_t> chosen_;  // [MoE layers, layer_slots]
  std::vector<int> counts_;       // of them, by MoE layer
  std::vector<uint16_t> order_;   // of ChooseExperts
  Stamps* stamps_ = nullptr;      // device [MoE layers]
  std::vector<Stamps> stamps_host_;
  int streamed_ = 0;     // a layer, at most
  int moe_layer_ = 0;    // at hand
  bool waited_ = false;  // for it
};

}  // namespace tandem::gpu
