#pragma once

// A gpu_worker for tests of the gateway: the real GpuWorkerService protocol over gRPC, with
// FakeModel in place of a model. Tokens are deterministic (FakeModel::Continuation) or scripted;
// faults are switched on from outside.
//
//   FakeGpuWorker worker({.address = "unix:" + dir + "/gpu.sock"});
//   ASSERT_TRUE(worker.Start());
//   ... worker.FailNextStep("expert worker lost"); worker.set_hung(true); worker.Kill(); ...
//
// Thread safety: all methods may be called from any thread. The destructor ends all calls.

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "tandem/worker/v1/gpu_worker.grpc.pb.h"
#include "tests/fakes/fake_model.h"

namespace tandem::testing {

struct FakeGpuWorkerOptions {
  std::string address = {};
  std::vector<FakeGroup> groups = {{.block_tokens = 4, .block_count = 64}};
  uint32_t vocab_size = 1000;
  uint32_t max_context_tokens = 4096;
  uint32_t max_step_rows = 32;
  uint32_t max_sequences = 8;
  uint32_t max_logprobs = 20;
  std::string model_type = "fake";
  uint32_t step_delay_ms = 0;  // of a step with sequences; heartbeats come every 20 ms meanwhile
  uint32_t load_steps = 3;     // progress messages
};

class FakeGpuWorker {
 public:
  explicit FakeGpuWorker(FakeGpuWorkerOptions options);
  ~FakeGpuWorker();

  // Listens. False if the address cannot be bound.
  bool Start();
  // Ends at once: all calls break, and all state is lost (the next Start has a new epoch).
  void Kill();
  // The stream breaks, the process and its cache live on.
  void BreakStream();

  // Next step with sequences: outcome UNAVAILABLE; until set_ready(true) so are all after it.
  void FailNextStep(std::string error);
  void set_ready(bool ready);
  bool ready() const;
  // Takes steps but does not answer them, nor send heartbeats.
  void set_hung(bool hung) { hung_ = hung; }
  void set_step_delay_ms(uint32_t delay_ms) { step_delay_ms_ = delay_ms; }
  // Load fails with this status from now on; OK: no more.
  void set_load_status(grpc::Status status);
  void set_script(std::vector<uint32_t> script);

  // The worker's answers without a server, for a port within the process.
  worker::v1::ModelInfo Model() const;
  worker::v1::StepResult Execute(const worker::v1::Step& step);
  // The stream has ended.
  void ForgetSequences();

  uint64_t steps() const { return steps_; }
  uint64_t loads() const { return loads_; }
  // Sequences that the worker keeps.
  size_t sequences() const;
  // Rows of the largest step so far.
  uint32_t largest_step() const { return largest_step_; }
  // What broke the protocol; empty if nothing.
  std::string error() const;
  std::vector<uint32_t> Continuation(const std::vector<uint32_t>& prompt,
                                     const FakeLimits& limits) const;
  // The log probability that is reported for a token.
  static float LogprobOf(uint32_t token) { return -static_cast<float>(1 + token % 10) / 8; }

 private:
  class Service;
  struct Rules {
    int top_logprobs = -1;
    int prompt_logprobs = -1;
  };
  using Stream = grpc::ServerReaderWriter<worker::v1::StepResponse, worker::v1::StepRequest>;

  worker::v1::ModelInfo Info() const;
  worker::v1::StepResult RunStep(const worker::v1::Step& step);
  void RunSequence(const worker::v1::SequenceStep& sequence, worker::v1::SequenceResult* result);
  // Waits as a step takes, with heartbeats. False if the call ended.
  bool Delay(const worker::v1::Step& step, grpc::ServerContext* context, Stream* stream);
  void NewModel();

  const FakeGpuWorkerOptions options_;
  std::atomic<bool> hung_{false};
  std::atomic<uint32_t> step_delay_ms_;
  std::atomic<uint64_t> steps_{0};
  std::atomic<uint64_t> loads_{0};
  std::atomic<uint32_t> largest_step_{0};
  std::atomic<uint64_t> streams_broken_{0};

  mutable std::mutex mutex_;
  std::unique_ptr<FakeModel> model_;
  std::map<uint64_t, Rules> rules_;
  std::vector<uint32_t> script_;
  std::optional<std::string> fail_next_;
  std::string last_failure_;
  bool ready_ = true;
  uint64_t epoch_ = 100;
  std::string error_;
  grpc::Status load_status_;

  std::unique_ptr<Service> service_;
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace tandem::testing
