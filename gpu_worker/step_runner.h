#pragma once

// Carries out Steps: validate, release, start, copy blocks, forward, sample, report. A step commits
// all of its sequences or none. Whatever the request holds, Run answers; it never fails.
//
// Outcomes: INVALID, nothing was changed; UNAVAILABLE, an expert worker was lost or the step is of
// another epoch: releases and starts were carried out (not for another epoch), no sequence advanced
// and those of the step are inactive from then on; OK otherwise. A sequence whose logits or router
// logits are not finite ends with NUMERIC_ERROR alone.
//
// Between a request and its sampled tokens nothing of this process's own code allocates once the
// buffers of the largest step have been used (protobuf messages are reused by the caller).
//
// Thread safety: one thread calls all methods but progress(). Ownership: backend, spec, weights and
// cache must outlive it; link and hot experts are the caller's.

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/clock.h"
#include "common/model/model_spec.h"
#include "gpu_worker/decoder.h"
#include "gpu_worker/expert_link.h"
#include "gpu_worker/hot_experts/hot_experts.h"
#include "gpu_worker/kv_cache.h"
#include "gpu_worker/sequence_table.h"
#include "gpu_worker/step_buffers.h"
#include "gpu_worker/step_pipeline.h"
#include "gpu_worker/step_plan.h"
#include "gpu_worker/step_trace.h"
#include "gpu_worker/step_validator.h"
#include "gpu_worker/token_counts.h"
#include "tandem/worker/v1/gpu_worker.pb.h"

namespace tandem::gpu {

struct StepRunnerOptions {
  int max_step_rows = 0;
  int max_sequences = 0;
  int max_context = 0;
  int max_logprobs = 20;
  bool hot_experts = false;  // set_hot_experts will be called
  PipelineOptions pipeline;
  const Clock* clock = nullptr;  // of step times; null: the steady one
  Tracer* tracer = nullptr;      // null: no timeline
};

class StepRunner {
 public:
  static absl::StatusOr<std::unique_ptr<StepRunner>> Create(Backend& backend, const ModelSpec& spec,
                                                            const ModelWeights& weights,
                                                            const KvCache& cache,
                                                            const StepRunnerOptions& options);

  // Null: steps with routed experts are UNAVAILABLE.
  void set_link(ExpertLink* link);
  // Null: no expert is resident. REQUIRES: options.hot_experts; before the first step.
  void set_hot_experts(HotExperts* hot) { hot_ = hot; }
  void set_epoch(uint64_t epoch) { epoch_ = epoch; }
  uint64_t epoch() const { return epoch_; }
  void set_tap(DecoderTap* tap) { decoder_->set_tap(tap); }

  // `result` is overwritten; what it holds is reused.
  void Run(const worker::v1::Step& step, worker::v1::StepResult& result);
  // Forgets all sequences; cached blocks stay.
  void Reset() { table_.Clear(); }

  const SequenceLimits& limits() const { return table_.limits(); }
  const Decoder& decoder() const { return *decoder_; }
  const SequenceTable& table() const { return table_; }
  const StepPlan& plan() const { return plan_; }
  const StepPipeline& pipeline() const { return *pipeline_; }
  // Grows while a step runs. Any thread.
  uint64_t progress() const { return decoder_->progress(); }

 private:
  StepRunner(Backend& backend, const ModelSpec& spec, const KvCache& cache,
             const SequenceLimits& limits, const StepRunnerOptions& options);
  absl::Status MakeBuffers(const ModelWeights& weights, const StepRunnerOptions& options);
  void StartAndRelease(const worker::v1::Step& step);
  absl::Status CopyBlocks(const worker::v1::Step& step);
  absl::Status Forward();
  void Stamp(int64_t StepStamps::*corner);
  void Enqueue();
  void EnqueueSampler(Rows rows);
  void EnqueuePromptLogprobs();
  void Download();
  void CountPicks();
  void ObserveStream();
  bool IsFinite(const PlannedSequence& planned) const;
  void Commit(const worker::v1::Step& step, worker::v1::StepResult& result);
  void TraceStep(const worker::v1::Step& step);
  worker::v1::WorkerFinish CommitSequence(const PlannedSequence& planned,
                                          const worker::v1::SequenceStep& step,
                                          worker::v1::SequenceResult& result);

  Backend& backend_;
  const ModelSpec& spec_;
  const KvCache& cache_;
  const SteadyClock steady_clock_;
  const Clock& clock_;
  std::unique_ptr<Decoder> decoder_;
  std::unique_ptr<TokenCounts> counts_;
  ExpertLink* link_ = nullptr;
  HotExperts* hot_ = nullptr;
  ExpertStream* stream_ = nullptr;  // of the step in progress
  uint64_t epoch_ = 0;
  uint64_t forwards_ = 0;
  SequenceTable table_;
  StepValidator validator_;
  StepPlan plan_;
  StepBuffers buffers_;
  std::unique_ptr<StepPipeline> pipeline_;
  StepTrace trace_;
  LayerArray<uint16_t> picks_;  // [buffer rows, top_k] a layer
};

}  // namespace tandem::gpu
