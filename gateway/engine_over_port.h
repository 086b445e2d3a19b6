#pragma once

// MakeEngine over any WorkerPort: for tests that play the worker without gRPC (whose libraries
// ThreadSanitizer cannot see into) while the engine's own threads are real.

#include <functional>
#include <memory>

#include "gateway/serving_engine.h"
#include "gateway/worker_port.h"

namespace tandem::gateway {

// Called once; the port lives as long as the engine and is used by the engine thread only.
using WorkerPortFactory = std::function<std::unique_ptr<WorkerPort>(WorkerEventSink)>;

std::unique_ptr<Engine> MakeEngineOverPort(EngineOptions options, TextSinkFactory text,
                                           std::shared_ptr<prometheus::Registry> registry,
                                           std::shared_ptr<const Clock> clock,
                                           const WorkerPortFactory& make_port);

}  // namespace tandem::gateway
