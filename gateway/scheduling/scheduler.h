#pragma once

// Decides what each step of the worker does. Pure logic: no I/O, no clock, no threads.
//
//   scheduler.Add({.id = 1, .prompt = ids, .max_tokens = 100});
//   while (auto plan = scheduler.Plan()) send(*plan);      // at most two steps are out
//   ... a result comes ...
//   ASSIGN_OR_RETURN(auto progress, scheduler.Complete(step_id, outcomes));
//
// Each step takes one row of every decoding sequence first, oldest first, then prompt chunks within
// a token budget (chunk_budget.h): prompts under way, then waiting ones. The step after the one in
// flight is planned before that one's result is known: a decoding sequence feeds its last sampled
// token, which only the worker knows. So a sequence whose tokens in flight may reach max_tokens
// sits out, and one that stopped is dropped one step late (step_table.h).
//
// Blocks are handed out as sequences grow; nothing is reserved for max_tokens, which is usually the
// rest of the context. When they run out, the youngest running sequence is preempted: it gives its
// blocks back, waits at the head of the queue and later starts again with prompt and generated
// tokens as its prompt. That reproduces it exactly (draws are keyed by seed and position, results
// do not depend on chunking) and costs one prefill, less what the prefix cache still holds. The
// oldest sequence is never preempted and fits alone (admission.h), so there is always progress. A
// new sequence starts only if its whole prompt and one block for each running sequence are
// available.
//
// Thread safety: one owner. REQUIRES of Add: the request fits (CheckFits) and its id is new.

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "gateway/scheduling/chunk_budget.h"
#include "gateway/scheduling/kv_blocks.h"
#include "gateway/scheduling/step_table.h"
#include "gateway/scheduling/waiting_queue.h"

namespace tandem::gateway {

struct SchedulerOptions {
  std::vector<BlockGroup> groups = {};
  uint32_t max_step_rows = 0;
  uint32_t max_sequences = 0;      // that the worker keeps at a time
  ChunkBudgetOptions chunks = {};  // max_tokens is set from max_step_rows
  bool prefix_cache = true;
  bool tenants_in_turn = true;
};

struct SequenceSpec {
  RequestId id = 0;
  std::string tenant;
  std::vector<uint32_t> prompt;  // not empty
  uint32_t max_tokens = 0;       // 0: the prompt is computed and nothing sampled
  bool use_prefix_cache = true;  // false where every prompt position must be computed
};

// One sequence's part of a step.
struct PlannedSequence {
  RequestId request = 0;
  uint64_t worker_sequence = 0;  // a new one after every preemption
  bool start = false;            // the worker does not know it yet
  uint32_t start_position = 0;
  std::vector<uint32_t> generated;  // with `start`: what it generated before it was preempted
  std::vector<uint32_t> tokens;     // empty: feed the last sampled token
  bool sample = false;
  std::optional<uint32_t> next_prompt_id;  // the prompt's token behind `tokens`
  BlockTables appended;                    // one list a group
};

struct StepPlan {
  uint64_t step_id = 0;
  std::vector<uint64_t> released;  // worker sequences to forget first
  std::vector<PlannedSequence> sequences;
  uint32_t decodes = 0;
  uint32_t prompt_tokens = 0;
  int64_t target_ns = 0;  // of the step's time, for the worker's advice; 0: none is wanted
};

enum class WorkerEnd : uint8_t { kNone, kStopToken, kMaxTokens, kNumericError, kInactive };

// What the worker reports of one sequence of a step.
struct SequenceOutcome {
  uint64_t worker_sequence = 0;
  std::vector<uint32_t> tokens;
  WorkerEnd end = WorkerEnd::kNone;
};

enum class SequenceEnd : uint8_t { kNone, kStopToken, kLength, kNumericError };

// What a finished step means for one open request. Requests that have ended before get none.
struct Progress {
  RequestId request = 0;
  size_t outcome = 0;            // index into the step's outcomes
  std::vector<uint32_t> tokens;  // generated
  uint32_t cached_tokens = 0;    // of the prompt, found in the prefix cache at its first start
  bool prompt_done = false;      // all of the prompt is computed
  SequenceEnd end = SequenceEnd::kNone;  // not kNone: the request is over
};

class Scheduler {
 public:
  // `first_id`: step and worker sequence ids start here (so that they do not repeat on one stream).
  explicit Scheduler(SchedulerOptions options, uint64_t first_id = 1);
  ~Scheduler();

  void Add(SequenceSpec spec);
  // The next step, or nothing: two are out, or there is nothing to do. A step that only carries
  // releases is planned when no other is out.
  std::optional<StepPlan> Plan();
  // A step without work, to see whether the worker answers. REQUIRES: none is out.
  StepPlan PlanProbe();

  // The oldest step out has succeeded. INTERNAL, with nothing changed, if the outcomes do not
  // answer that step: the worker and this side disagree, and only WorkerLost() helps.
  absl::StatusOr<std::vector<Progress>> Complete(uint64_t step_id,
                                                 std::span<const SequenceOutcome> outcomes);
  // It has failed and no sequence advanced: all open requests end. Returns their ids. Another step
  // may still be out; whatever it brings is dropped.
  absl::StatusOr<std::vector<RequestId>> Fail(uint64_t step_id);

  // The request ends from this side: a stop string or its client left. No more progress comes.
  // False if it is not open.
  bool End(RequestId id);
  // The worker forgot all sequences and no step is out any more: all open requests end. Returns
  // their ids. Known prefixes stay, unless `forget_blocks`.
  std::vector<RequestId> WorkerLost(bool forget_blocks);

  void ObserveStep(uint32_t decodes, uint32_t prompt_tokens, int64_t duration_ns) {
    chunks_.Observe(decodes, prompt_tokens, duration_ns);
  }
  // What the worker advises for a step's prompt tokens beside so many decodes; 0: nothing.
  void Advise(uint32_t decodes, uint32_t prompt_tokens) { chunks_.Advise(decodes, prompt_tokens); }

  size_t steps_out() const { return steps_.size(); }
  size_t waiting() const { return waiting_.size(); }
  size_t running() const { return running_.size(); }  // draining ones included
  uint64_t preemptions() const { return preemptions_; }
  uint64_t next_id() const { return next_id_; }
  const KvBlocks& blocks() const { return blocks_; }
  std::optional<SequenceState> StateOf(RequestId id) const;

  // What is wrong with the books, empty if nothing. For tests; walks everything.
  std::string Audit() const;

 private:
  struct Sequence;
  // A sequence's share of a step out.
  struct Share {
    Sequence* sequence = nullptr;
    uint64_t worker_sequence = 0;
    uint32_t end_position = 0;  // behind the last position of the share
    bool sample = false;
  };
  struct Step {
    uint64_t id = 0;
    StepState state = StepState::kSent;
    std::vector<Share> shares;
  };

  void Apply(Sequence* sequence, SequenceEvent event);
  void EndSequence(Sequence* sequence);
  void ReleaseFromWorker(Sequence* sequence);
  void BecomeIdle(Sequence* sequence);
  void GiveBackBlocks(Sequence* sequence);

  void PlanDecodes(StepPlan* plan, Step* step);
  void PlanPrompts(StepPlan* plan, Step* step);
  void StartWaiting(StepPlan* plan, Step* step, uint32_t budget);
  bool CanStart(const Sequence& sequence) const;
  void Start(Sequence* sequence);
  // Plans up to `budget` prompt tokens; returns how many.
  uint32_t PlanChunk(Sequence* sequence, uint32_t budget, StepPlan* plan, Step* step);
  PlannedSequence* AddShare(Sequence* sequence, uint32_t rows, bool sample, StepPlan* plan,
                            Step* step);
  // Grows its tables, preempting younger sequences if need be.
  bool MakeRoom(Sequence* sequence, uint64_t tokens);
  bool PreemptYoungerThan(const Sequence& sequence);
  std::optional<StepPlan> Send(StepPlan plan, Step step);

  absl::Status CheckAnswer(const Step& step, uint64_t step_id,
                           std::span<const SequenceOutcome> outcomes) const;
  Progress Advance(const Share& share, const SequenceOutcome& outcome);
  void Settle(const Step& step);
  std::vector<RequestId> OpenRequests() const;

  SchedulerOptions options_;
  KvBlocks blocks_;
  ChunkBudget chunks_;
  WaitingQueue waiting_;
  std::unordered_map<RequestId, std::unique_ptr<Sequence>> sequences_;
  std::vector<Sequence*> running_;  // every state but waiting, oldest first
  std::deque<Step> steps_;          // out, oldest first
  std::vector<uint64_t> released_;  // for the next step
  uint64_t next_id_;
  uint64_t next_age_ = 1;
  uint64_t preemptions_ = 0;
};

}  // namespace tandem::gateway
