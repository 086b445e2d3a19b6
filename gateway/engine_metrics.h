#pragma once

// Metrics of the engine, declared here and nowhere else. Every accepted request is counted once,
// when it ends, whatever ends it: in requests_total and in each per-request histogram (time to
// first token aside: only those that had one). So sums agree also for clients that left.
//
// Thread safety: all methods may be called from any thread.

#include <prometheus/counter.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "gateway/engine.h"
#include "gateway/scheduling/kv_blocks.h"

namespace tandem::gateway {

enum class Rejection : uint8_t { kQueueFull, kUnavailable, kInvalid };
inline constexpr int kRejections = 3;

// One ended request. Times in nanoseconds of the engine's clock; first_token_ns 0: had none.
struct RequestFigures {
  FinishReason reason = FinishReason::kNone;
  int64_t submitted_ns = 0;
  int64_t started_ns = 0;  // 0: never left the queue
  int64_t ended_ns = 0;
  uint32_t prompt_tokens = 0;
  uint32_t completion_tokens = 0;
};

class EngineMetrics {
 public:
  explicit EngineMetrics(std::shared_ptr<prometheus::Registry> registry);

  void CountRequest(const RequestFigures& figures);
  void CountRejection(Rejection why) { rejected_[static_cast<int>(why)]->Increment(); }
  void ObserveFirstToken(int64_t delay_ns);
  void ObserveTokenGap(int64_t gap_ns);
  void CountGenerated(uint32_t tokens) { generation_tokens_->Increment(tokens); }
  void CountPrefix(uint32_t prompt_tokens, uint32_t hit_tokens);
  void ObserveStep(int64_t duration_ns, uint32_t rows);
  void CountPreemptions(uint64_t count) { preemptions_->Increment(static_cast<double>(count)); }

  void SetQueue(uint32_t requests, uint64_t tokens);
  void SetRunning(size_t sequences) { running_->Set(static_cast<double>(sequences)); }
  void SetBlocks(const KvBlocks& blocks);
  void SetWorkerUp(bool up) { worker_up_->Set(up ? 1 : 0); }
  void CountWorkerLoss() { worker_losses_->Increment(); }

 private:
  prometheus::Counter& AddCounter(const char* name, const char* help);
  prometheus::Gauge& AddGauge(const char* name, const char* help);
  prometheus::Histogram& AddHistogram(const char* name, const char* help,
                                      const prometheus::Histogram::BucketBoundaries& buckets);

  std::shared_ptr<prometheus::Registry> registry_;
  prometheus::Counter* requests_[5] = {};  // by FinishReason
  prometheus::Counter* rejected_[kRejections] = {};
  prometheus::Counter* prompt_tokens_;
  prometheus::Counter* generation_tokens_;
  prometheus::Counter* prefix_queries_;
  prometheus::Counter* prefix_hits_;
  prometheus::Counter* preemptions_;
  prometheus::Counter* steps_;
  prometheus::Counter* worker_losses_;
  prometheus::Gauge* waiting_requests_;
  prometheus::Gauge* waiting_tokens_;
  prometheus::Gauge* running_;
  prometheus::Gauge* worker_up_;
  prometheus::Family<prometheus::Gauge>* total_blocks_;
  prometheus::Family<prometheus::Gauge>* free_blocks_;
  prometheus::Histogram* queue_time_;
  prometheus::Histogram* first_token_;
  prometheus::Histogram* token_gap_;
  prometheus::Histogram* duration_;
  prometheus::Histogram* request_prompt_tokens_;
  prometheus::Histogram* request_generation_tokens_;
  prometheus::Histogram* step_duration_;
  prometheus::Histogram* step_rows_;
};

}  // namespace tandem::gateway
