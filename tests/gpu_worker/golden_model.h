#pragma once

// A model (of shared/golden/models, or the shipped one) loaded into the CPU backend behind a
// StepRunner, with its routed experts in process, and its expected values where it has any: what
// tests and benches of whole models stand on.

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/checkpoint/checkpoint.h"
#include "common/model/model_spec.h"
#include "gpu_worker/backend_cpu/cpu_backend.h"
#include "gpu_worker/hot_experts/hot_experts.h"
#include "gpu_worker/inprocess_experts.h"
#include "gpu_worker/kv_cache.h"
#include "gpu_worker/model_weights.h"
#include "gpu_worker/step_runner.h"

namespace tandem::gpu {

struct GoldenOptions {
  std::vector<uint32_t> shares = {1};
  bool parity = true;
  int threads = 2;
  int max_step_rows = 256;
  int max_sequences = 4;
  int max_context = 256;
  PipelineOptions pipeline = {};
  const Clock* clock = nullptr;  // of step times; null: the steady one
  Tracer* tracer = nullptr;
  uint64_t hot_experts_bytes = 0;
  bool stream_prompts = false;
  int fixed_streamed = -1;
  HotPolicy::Options hot_policy = {};
  // Puts a backend of the test's own between the runner and the CPU backend.
  std::function<std::unique_ptr<Backend>(CpuBackend&)> wrap = {};
  // Puts a source of the test's own before the experts in process, for copies of hot experts.
  std::function<std::unique_ptr<ExpertWeightSource>(ExpertWeightSource&)> wrap_source = {};
};

class GoldenModel {
 public:
  static absl::StatusOr<std::unique_ptr<GoldenModel>> Load(const std::string& dir,
                                                           const GoldenOptions& options);

  StepRunner& runner() { return *runner_; }
  // What the runner enqueues on: the CPU backend, or the test's own.
  Backend& backend() { return wrapper_ == nullptr ? *backend_ : *wrapper_; }
  const ModelWeights& weights() const { return weights_; }
  // Null for models without routed experts.
  ExpertLink* link() { return experts_ == nullptr ? nullptr : experts_->link(); }
  // Null without hot_experts_bytes.
  HotExperts* hot_experts() { return hot_.get(); }
  const ModelSpec& spec() const { return spec_; }

  bool Has(const std::string& name) const;
  std::vector<float> Floats(const std::string& name) const;
  std::vector<uint32_t> Ids(const std::string& name) const;

 private:
  GoldenModel() = default;
  absl::Status MakeHotExperts(const GoldenOptions& options);

  std::unique_ptr<Checkpoint> checkpoint_;
  std::unique_ptr<SafetensorsFile> expected_;
  ModelSpec spec_;
  std::unique_ptr<CpuBackend> backend_;
  std::unique_ptr<Backend> wrapper_;
  ModelWeights weights_;
  KvCache cache_;
  std::unique_ptr<InProcessExperts> experts_;
  std::unique_ptr<StoreExperts> weight_source_;
  std::unique_ptr<ExpertWeightSource> source_wrapper_;
  std::unique_ptr<HotExperts> hot_;
  std::unique_ptr<StepRunner> runner_;
};

// What a forward computed, by position of the sequence that was fed.
struct Trace {
  std::map<uint32_t, std::vector<float>> logits;                 // [vocab]
  std::vector<std::map<uint32_t, std::vector<float>>> hidden;    // [layers + 1][position][hidden]
  std::vector<std::map<uint32_t, std::vector<uint16_t>>> picks;  // [MoE layers][position][top_k]
};

// Feeds one or more sequences to a StepRunner the way a gateway does, and records everything.
class GoldenDriver : public DecoderTap {
 public:
  explicit GoldenDriver(GoldenModel& model);
  ~GoldenDriver() override;

  struct Feed {
    uint64_t id = 1;
    std::vector<uint32_t> prompt;
    int first_block = 0;  // its blocks are consecutive from here
  };
  // Runs all prompts to their end, `chunk` tokens of each a step (0: whole), then `new_tokens`
  // greedy steps. Returns the sampled tokens of each.
  std::vector<std::vector<uint32_t>> Generate(const std::vector<Feed>& feeds, uint32_t chunk,
                                              uint32_t new_tokens);
  const Trace& trace(uint64_t id) const { return traces_.at(id); }

  void OnHidden(int layer, int first_row, Rows rows, ConstMatrix hidden) override;
  void OnLogits(const int32_t* indices, const int32_t* count, ConstMatrix logits) override;

 private:
  struct RowOwner {
    uint64_t id;
    uint32_t position;
  };
  // Of a row of the step's buffers.
  const RowOwner& OwnerOf(int place) const;
  void AddStart(worker::v1::Step& step, const Feed& feed, uint32_t new_tokens) const;
  void AddChunk(worker::v1::Step& step, const Feed& feed, uint32_t begin, uint32_t end);
  void AddDecode(worker::v1::Step& step, const Feed& feed, uint32_t position);
  void AddBlocks(worker::v1::SequenceStep& sequence, const Feed& feed, uint32_t begin,
                 uint32_t end) const;
  void Run(const worker::v1::Step& step);
  void RecordPicks();

  GoldenModel& model_;
  std::vector<RowOwner> rows_;  // of the step in progress
  std::map<uint64_t, Trace> traces_;
  worker::v1::StepResult result_;
  std::map<uint64_t, std::vector<uint32_t>> sampled_;
  uint64_t step_id_ = 0;
};

}  // namespace tandem::gpu
