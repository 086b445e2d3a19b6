#pragma once

// A scheduler and a fake worker, step by step: Send() plans a step and lets the worker compute it,
// Receive() gives the oldest result back. After each call the scheduler's books are audited and the
// worker's complaints are test failures.

#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "gateway/scheduling/scheduler.h"
#include "tests/fakes/fake_model.h"

namespace tandem::gateway {

struct HarnessRequest {
  std::vector<uint32_t> prompt;
  testing::FakeLimits limits = {};
  std::vector<uint32_t> generated = {};
  uint32_t cached_tokens = 0;
  int ends = 0;  // terminal events
  SequenceEnd end = SequenceEnd::kNone;
  bool failed = false;     // ended by Fail or WorkerLost
  bool cancelled = false;  // ended by Cancel
  bool open() const { return ends == 0; }
};

class SchedulerHarness {
 public:
  explicit SchedulerHarness(SchedulerOptions options, uint32_t vocab_size = 1000);

  struct AddOptions {
    std::string tenant = {};
    std::vector<uint32_t> stop_ids = {};
    uint32_t min_tokens = 0;
    uint64_t seed = 0;
    bool use_prefix_cache = true;
  };
  RequestId Add(std::vector<uint32_t> prompt, uint32_t max_tokens, AddOptions options);
  RequestId Add(std::vector<uint32_t> prompt, uint32_t max_tokens) {
    return Add(std::move(prompt), max_tokens, AddOptions{});
  }
  // The plan that was sent; nothing if the scheduler had none.
  std::optional<StepPlan> Send();
  // False if no step is out.
  bool Receive();
  // The oldest step out fails.
  void FailStep();
  void LoseWorker(bool new_epoch);
  void Cancel(RequestId id);
  // Runs until nothing is left to do, with two steps out where possible. False if it does not end.
  bool RunAll();

  const HarnessRequest& request(RequestId id) const { return requests_.at(id); }
  const std::map<RequestId, HarnessRequest>& requests() const { return requests_; }
  // What the request must have generated at its normal end.
  std::vector<uint32_t> Expected(RequestId id) const;
  Scheduler& scheduler() { return *scheduler_; }
  testing::FakeModel& model() { return *model_; }
  size_t steps_sent() const { return steps_sent_; }
  // Empty, or what is wrong: books, protocol, a block that is not back at idle.
  std::string Problem() const;

 private:
  // One sequence's part of a step out: what it wrote, in which blocks.
  struct Touched {
    RequestId request = 0;
    uint64_t worker_sequence = 0;
    BlockTables tables;
    uint32_t begin = 0;
    uint32_t end = 0;
    bool sample = false;
  };
  struct Out {
    uint64_t step_id;
    std::vector<SequenceOutcome> outcomes;
    std::vector<Touched> touched;
  };
  void MakeModel();
  void Compute(const StepPlan& plan);
  void Check(const StepPlan& plan);
  void CheckWrites(const Touched& touched);
  void CheckSamples(const Touched& touched);
  // What the steps out wrote is not to be relied on.
  void SpoilStepsOut();

  SchedulerOptions options_;
  uint32_t vocab_size_;
  std::unique_ptr<testing::FakeModel> model_;
  std::unique_ptr<Scheduler> scheduler_;
  std::map<RequestId, HarnessRequest> requests_;
  std::deque<Out> out_;
  std::map<uint64_t, BlockTables> tables_;  // by worker sequence, as the worker knows them
  RequestId next_request_ = 1;
  size_t steps_sent_ = 0;
  std::string problem_;
};

}  // namespace tandem::gateway
