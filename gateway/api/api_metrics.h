#pragma once

// What the HTTP and gRPC front ends count: calls by endpoint and outcome, and their duration.
// Tokens and queueing are the engine's metrics. Thread-safe.

#include <prometheus/counter.h>
#include <prometheus/family.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>

#include <memory>
#include <string>

namespace tandem::gateway {

class ApiMetrics {
 public:
  explicit ApiMetrics(std::shared_ptr<prometheus::Registry> registry);

  // `protocol`: http or grpc; `endpoint`: a route or method name of ours; `code`: an HTTP status or
  // the name of a gRPC status. All three come from small fixed sets.
  void Count(const std::string& protocol, const std::string& endpoint, const std::string& code,
             double seconds);

 private:
  std::shared_ptr<prometheus::Registry> registry_;
  prometheus::Family<prometheus::Counter>& calls_;
  prometheus::Family<prometheus::Histogram>& durations_;
};

}  // namespace tandem::gateway
