#pragma once

// WorkerPort over gRPC (callback API): Load as a server stream, Step as a bidirectional stream.
//
// Every connection has a channel of its own, so that a restarted worker is found at once; the
// caller decides when to try again. Thread safety: all methods from one thread; the sink is called
// from gRPC's threads. The destructor cancels everything and returns when no callback runs any
// more.

#include <cstdint>
#include <memory>
#include <string>

#include "gateway/worker_port.h"

namespace tandem::gateway {

struct WorkerClientOptions {
  std::string address;    // gRPC target
  std::string model_dir;  // as the worker sees it
  uint32_t load_timeout_ms = 3600 * 1000;
  uint32_t query_timeout_ms = 1000;
};

class WorkerClient final : public WorkerPort {
 public:
  WorkerClient(WorkerClientOptions options, WorkerEventSink sink);
  ~WorkerClient() override;
  WorkerClient(const WorkerClient&) = delete;
  WorkerClient& operator=(const WorkerClient&) = delete;

  void Connect(uint64_t connection) override;
  void Send(worker::v1::StepRequest request) override;
  void QueryReady() override;
  void Disconnect() override;

 private:
  class Connection;

  const WorkerClientOptions options_;
  const WorkerEventSink sink_;
  std::unique_ptr<Connection> connection_;
};

}  // namespace tandem::gateway
