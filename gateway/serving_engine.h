#pragma once

// The gateway's engine: one thread that owns the scheduler, talks to the gpu_worker over its Step
// stream and turns results into events (gateway/engine.h).
//
//   auto engine = MakeEngine(options, MakeTextSinkFactory(tokenizer.get()), registry);
//   ... front ends call engine->Submit ...
//   engine->Drain(30000);  // then destroy it
//
// The worker need not be there yet: the engine connects, loads the model and reconnects with
// back-off for as long as it lives; until then Submit and Ready answer UNAVAILABLE and say why.
// Losing the worker (stream broken, no sign of progress within `step_timeout_ms`, new epoch) or one
// of its experts (step outcome UNAVAILABLE) ends every open request with one UNAVAILABLE error.
// A model that cannot be loaded (DATA_LOSS, INVALID_ARGUMENT, NOT_FOUND, UNIMPLEMENTED,
// RESOURCE_EXHAUSTED from Load) is not tried again: Ready answers with that error, its code kept.
//
// Ownership: `registry` is shared; a tokenizer behind the factory must outlive the engine. The
// destructor ends all open requests (kError, UNAVAILABLE) and returns when no callback runs.

#include <prometheus/registry.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "common/base/clock.h"
#include "common/base/trace.h"
#include "gateway/engine.h"
#include "gateway/text_sink.h"

namespace tandem::gateway {

struct EngineOptions {
  // gRPC target of the gpu_worker, e.g. "unix:/run/tandem/gpu.sock".
  std::string worker_address;
  // As the worker sees it.
  std::string model_dir;
  std::string served_name;
  // Stop tokens of the model: the union of config.json's, generation_config.json's and the
  // tokenizer's. Added to every request without ignore_eos.
  std::vector<uint32_t> end_ids;

  // Requests and prompt tokens that wait for their first step.
  uint32_t max_queue_requests = 256;
  uint64_t max_queue_tokens = uint64_t{1} << 20;
  // Prompt tokens in one step; 0: chosen so that steps with decodes stay under `itl_target_ms`.
  uint32_t prefill_chunk_tokens = 0;
  uint32_t itl_target_ms = 100;
  bool prefix_cache = true;
  // Waiting requests are taken from each tenant in turn.
  bool tenant_fairness = true;

  // A step outstanding for so long without result or heartbeat means that the worker is lost.
  uint32_t step_timeout_ms = 1500;
  // An idle engine sends an empty step so often, to know that the worker still answers.
  uint32_t idle_probe_ms = 1000;
  uint32_t reconnect_min_ms = 50;
  uint32_t reconnect_max_ms = 1000;
  uint32_t load_timeout_ms = 3600 * 1000;

  // Gets the engine's tracks; null: no timeline.
  Tracer* tracer = nullptr;
};

// `clock` is a test seam: null means the steady clock.
std::unique_ptr<Engine> MakeEngine(EngineOptions options, TextSinkFactory text,
                                   std::shared_ptr<prometheus::Registry> registry,
                                   std::shared_ptr<const Clock> clock = nullptr);

}  // namespace tandem::gateway
