#pragma once

// Metrics of a process: families are declared by their owner on a prometheus::Registry, and
// MetricsServer serves GET /metrics on a port of its own. FamilyList
// is for registries that read their owner at each scrape instead. Names:
// tandem_<service>_<noun>_<unit>[_total], base units, bounded labels. Thread-safe.

#include <prometheus/registry.h>

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace tandem {

class MetricsServer {
 public:
  // Binds `host`:`port` (0 picks a free port) and serves until destroyed.
  // Errors: UNAVAILABLE naming the address that cannot be bound.
  static absl::StatusOr<std::unique_ptr<MetricsServer>> Start(
      const std::string& host, int port, std::shared_ptr<prometheus::Registry> registry);
  ~MetricsServer();

  int port() const;

 private:
  struct Impl;
  explicit MetricsServer(std::unique_ptr<Impl> impl);

  std::unique_ptr<Impl> impl_;
};

// Appends families of one metric each to a list, as Registry::Collect overrides do. Not
// thread-safe; the list must outlive it.
class FamilyList {
 public:
  explicit FamilyList(std::vector<prometheus::MetricFamily>* families) : families_(families) {}

  void Gauge(std::string_view name, std::string_view help, double value,
             std::vector<prometheus::ClientMetric::Label> labels = {});
  void Counter(std::string_view name, std::string_view help, double value,
               std::vector<prometheus::ClientMetric::Label> labels = {});

 private:
  // Metrics of one name that follow each other are one family.
  prometheus::ClientMetric& Add(std::string_view name, std::string_view help,
                                prometheus::MetricType type);

  std::vector<prometheus::MetricFamily>* const families_;
};

// The text exposition of `registry`, with the process's own metrics (resident memory, CPU seconds,
// open files, build) added.
std::string RenderMetrics(prometheus::Registry& registry);

}  // namespace tandem
