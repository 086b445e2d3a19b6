#include "gateway/engine_metrics.h"

#include <algorithm>
#include <string>
#include <utility>

namespace tandem::gateway {
namespace {

using Buckets = prometheus::Histogram::BucketBoundaries;

double Seconds(int64_t ns) { return static_cast<double>(std::max<int64_t>(ns, 0)) * 1e-9; }

// A first token takes milliseconds on a small model and many minutes behind a long prompt.
Buckets FirstTokenBuckets() {
  return {0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 640, 2560};
}
// Dense between 10 and 500 ms, where CPU and GPU hybrids are.
Buckets TokenGapBuckets() {
  return {0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1,
          0.15,  0.2,    0.3,   0.4,  0.5,   0.75, 1,    2.5,  5,    10};
}
Buckets RequestBuckets() {
  return {0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 240, 480, 960, 1920, 7680};
}
Buckets TokenBuckets() {
  return {1,    2,    5,    10,    20,    50,    100,    200,    500,
          1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000, 500000};
}
Buckets RowBuckets() { return {0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192}; }

constexpr std::pair<FinishReason, const char*> kOutcomes[] = {
    {FinishReason::kStop, "stop"},
    {FinishReason::kLength, "length"},
    {FinishReason::kError, "error"},
    {FinishReason::kCancelled, "cancelled"},
};
constexpr std::pair<Rejection, const char*> kReasons[] = {
    {Rejection::kQueueFull, "queue_full"},
    {Rejection::kUnavailable, "unavailable"},
    {Rejection::kInvalid, "invalid"},
};

}  // namespace

prometheus::Counter& EngineMetrics::AddCounter(const char* name, const char* help) {
  return prometheus::BuildCounter().Name(name).Help(help).Register(*registry_).Add({});
}

prometheus::Gauge& EngineMetrics::AddGauge(const char* name, const char* help) {
  return prometheus::BuildGauge().Name(name).Help(help).Register(*registry_).Add({});
}

prometheus::Histogram& EngineMetrics::AddHistogram(const char* name, const char* help,
                                                   const Buckets& buckets) {
  return prometheus::BuildHistogram().Name(name).Help(help).Register(*registry_).Add({}, buckets);
}

EngineMetrics::EngineMetrics(std::shared_ptr<prometheus::Registry> registry)
    : registry_(std::move(registry)) {
  auto& requests = prometheus::BuildCounter()
                       .Name("tandem_gateway_requests_total")
                       .Help("Accepted requests that ended, by outcome.")
                       .Register(*registry_);
  for (const auto& [reason, name] : kOutcomes) {
    requests_[static_cast<int>(reason)] = &requests.Add({{"outcome", name}});
  }
  auto& rejected = prometheus::BuildCounter()
                       .Name("tandem_gateway_rejected_requests_total")
                       .Help("Requests that were not accepted, by reason.")
                       .Register(*registry_);
  for (const auto& [why, name] : kReasons) {
    rejected_[static_cast<int>(why)] = &rejected.Add({{"reason", name}});
  }
  prompt_tokens_ =
      &AddCounter("tandem_gateway_prompt_tokens_total", "Prompt tokens of requests that ended.");
  generation_tokens_ =
      &AddCounter("tandem_gateway_generation_tokens_total", "Tokens generated for clients.");
  prefix_queries_ = &AddCounter("tandem_gateway_prefix_cache_query_tokens_total",
                                "Prompt tokens looked up in the prefix cache.");
  prefix_hits_ = &AddCounter("tandem_gateway_prefix_cache_hit_tokens_total",
                             "Prompt tokens found in the prefix cache.");
  preemptions_ = &AddCounter("tandem_gateway_preemptions_total",
                             "Sequences that gave up their KV blocks to an older one.");
  steps_ = &AddCounter("tandem_gateway_steps_total", "Worker steps that were completed.");
  worker_losses_ = &AddCounter("tandem_gateway_worker_losses_total",
                               "Times that a connected gpu_worker was lost.");
  waiting_requests_ =
      &AddGauge("tandem_gateway_waiting_requests", "Requests that wait for their first step.");
  waiting_tokens_ =
      &AddGauge("tandem_gateway_waiting_tokens", "Prompt tokens of the requests that wait.");
  running_ = &AddGauge("tandem_gateway_running_sequences", "Sequences that hold KV blocks.");
  worker_up_ = &AddGauge("tandem_gateway_worker_up", "1 while the gpu_worker serves.");
  total_blocks_ = &prometheus::BuildGauge()
                       .Name("tandem_gateway_kv_total_blocks")
                       .Help("KV blocks of the worker, by cache group.")
                       .Register(*registry_);
  free_blocks_ = &prometheus::BuildGauge()
                      .Name("tandem_gateway_kv_free_blocks")
                      .Help("KV blocks that no sequence uses (cached prefixes included).")
                      .Register(*registry_);
  queue_time_ = &AddHistogram("tandem_gateway_queue_time_seconds",
                              "Time from acceptance to the first step, or to the end without one.",
                              FirstTokenBuckets());
  first_token_ = &AddHistogram("tandem_gateway_time_to_first_token_seconds",
                               "Time from acceptance to the first token.", FirstTokenBuckets());
  token_gap_ = &AddHistogram("tandem_gateway_inter_token_latency_seconds",
                             "Time between two tokens of one request.", TokenGapBuckets());
  duration_ = &AddHistogram("tandem_gateway_request_duration_seconds",
                            "Time from acceptance to the end.", RequestBuckets());
  request_prompt_tokens_ = &AddHistogram("tandem_gateway_request_prompt_tokens",
                                         "Prompt tokens a request.", TokenBuckets());
  request_generation_tokens_ = &AddHistogram("tandem_gateway_request_generation_tokens",
                                             "Generated tokens a request.", TokenBuckets());
  step_duration_ = &AddHistogram("tandem_gateway_step_duration_seconds", "Time of a worker step.",
                                 TokenGapBuckets());
  step_rows_ = &AddHistogram("tandem_gateway_step_rows", "Rows of a worker step.", RowBuckets());
}

void EngineMetrics::CountRequest(const RequestFigures& figures) {
  requests_[static_cast<int>(figures.reason)]->Increment();
  const int64_t left_queue = figures.started_ns != 0 ? figures.started_ns : figures.ended_ns;
  queue_time_->Observe(Seconds(left_queue - figures.submitted_ns));
  duration_->Observe(Seconds(figures.ended_ns - figures.submitted_ns));
  request_prompt_tokens_->Observe(figures.prompt_tokens);
  request_generation_tokens_->Observe(figures.completion_tokens);
  prompt_tokens_->Increment(figures.prompt_tokens);
}

void EngineMetrics::ObserveFirstToken(int64_t delay_ns) {
  first_token_->Observe(Seconds(delay_ns));
}

void EngineMetrics::ObserveTokenGap(int64_t gap_ns) { token_gap_->Observe(Seconds(gap_ns)); }

void EngineMetrics::CountPrefix(uint32_t prompt_tokens, uint32_t hit_tokens) {
  prefix_queries_->Increment(prompt_tokens);
  prefix_hits_->Increment(hit_tokens);
}

void EngineMetrics::ObserveStep(int64_t duration_ns, uint32_t rows) {
  steps_->Increment();
  step_duration_->Observe(Seconds(duration_ns));
  step_rows_->Observe(rows);
}

void EngineMetrics::SetQueue(uint32_t requests, uint64_t tokens) {
  waiting_requests_->Set(requests);
  waiting_tokens_->Set(static_cast<double>(tokens));
}

void EngineMetrics::SetBlocks(const KvBlocks& blocks) {
  for (size_t g = 0; g < blocks.groups(); ++g) {
    const prometheus::Labels labels = {{"group", std::to_string(g)}};
    total_blocks_->Add(labels).Set(blocks.total(g));
    free_blocks_->Add(labels).Set(blocks.available(g));
  }
}

}  // namespace tandem::gateway
