#include "gateway/api/api_metrics.h"

namespace tandem::gateway {
namespace {

// From a health check to a long generation.
const prometheus::Histogram::BucketBoundaries kSecondsBuckets = {
    0.001, 0.005, 0.025, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600};

}  // namespace

ApiMetrics::ApiMetrics(std::shared_ptr<prometheus::Registry> registry)
    : registry_(std::move(registry)),
      calls_(prometheus::BuildCounter()
                 .Name("tandem_gateway_api_calls_total")
                 .Help("Calls of the public API that ended, by protocol, endpoint and code; HTTP "
                       "code 499 and gRPC CANCELLED mean that the client left.")
                 .Register(*registry_)),
      durations_(prometheus::BuildHistogram()
                     .Name("tandem_gateway_api_call_duration_seconds")
                     .Help("Time from a call's arrival to the end of its response.")
                     .Register(*registry_)) {}

void ApiMetrics::Count(const std::string& protocol, const std::string& endpoint,
                       const std::string& code, double seconds) {
  calls_.Add({{"protocol", protocol}, {"endpoint", endpoint}, {"code", code}}).Increment();
  durations_.Add({{"protocol", protocol}, {"endpoint", endpoint}}, kSecondsBuckets)
      .Observe(seconds);
}

}  // namespace tandem::gateway
