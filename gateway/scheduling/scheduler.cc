#include "gateway/scheduling/scheduler.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/base/check.h"
#include "common/base/status.h"
#include "gateway/scheduling/sequence.h"

namespace tandem::gateway {
namespace {

ChunkBudgetOptions WithRows(ChunkBudgetOptions chunks, uint32_t max_step_rows) {
  chunks.max_tokens = max_step_rows;
  return chunks;
}

}  // namespace

Scheduler::Scheduler(SchedulerOptions options, uint64_t first_id)
    : options_(std::move(options)),
      blocks_(options_.groups, options_.prefix_cache),
      chunks_(WithRows(options_.chunks, options_.max_step_rows)),
      waiting_(options_.tenants_in_turn),
      next_id_(first_id) {
  TANDEM_CHECK(options_.max_step_rows > 0 && options_.max_sequences > 0);
}

Scheduler::~Scheduler() = default;

void Scheduler::Add(SequenceSpec spec) {
  TANDEM_CHECK(!spec.prompt.empty());
  auto sequence = std::make_unique<Sequence>();
  sequence->id = spec.id;
  sequence->prompt_tokens = static_cast<uint32_t>(spec.prompt.size());
  sequence->tokens = std::move(spec.prompt);
  sequence->max_tokens = spec.max_tokens;
  sequence->path.tenant = std::move(spec.tenant);
  sequence->path.enabled = spec.use_prefix_cache;
  waiting_.Push(sequence->path.tenant, spec.id);
  TANDEM_CHECK(sequences_.emplace(spec.id, std::move(sequence)).second);
}

std::optional<SequenceState> Scheduler::StateOf(RequestId id) const {
  const auto it = sequences_.find(id);
  if (it == sequences_.end()) return std::nullopt;
  return it->second->state;
}

void Scheduler::Apply(Sequence* sequence, SequenceEvent event) {
  const std::optional<SequenceState> next = Next(sequence->state, event);
  TANDEM_CHECK(next.has_value());
  sequence->state = *next;
}

bool Scheduler::End(RequestId id) {
  const auto it = sequences_.find(id);
  if (it == sequences_.end() || !IsOpen(it->second->state)) return false;
  EndSequence(it->second.get());
  return true;
}

void Scheduler::EndSequence(Sequence* sequence) {
  const bool waits = sequence->state == SequenceState::kWaiting;
  ReleaseFromWorker(sequence);
  Apply(sequence, SequenceEvent::kEnd);
  if (waits) {
    TANDEM_CHECK(waiting_.Remove(sequence->id));
    sequences_.erase(sequence->id);
  } else if (sequence->steps_out == 0) {
    BecomeIdle(sequence);
  }
}

// The next step tells the worker to forget it. Steps run in order, so one in flight is not
// disturbed.
void Scheduler::ReleaseFromWorker(Sequence* sequence) {
  if (sequence->announced) released_.push_back(sequence->worker_sequence);
  sequence->announced = false;
}

// Nothing in flight touches the blocks of a sequence that is on its way out.
void Scheduler::BecomeIdle(Sequence* sequence) {
  ReleaseFromWorker(sequence);
  Apply(sequence, SequenceEvent::kIdle);
  GiveBackBlocks(sequence);
  std::erase(running_, sequence);
  if (sequence->state == SequenceState::kWaiting) {
    waiting_.PushPreempted(sequence->age, sequence->id);
  } else {
    sequences_.erase(sequence->id);
  }
}

void Scheduler::GiveBackBlocks(Sequence* sequence) {
  blocks_.Release(&sequence->tables);
  sequence->path.parent = 0;
  sequence->path.blocks = 0;
}

absl::Status Scheduler::CheckAnswer(const Step& step, uint64_t step_id,
                                    std::span<const SequenceOutcome> outcomes) const {
  if (step.id != step_id) {
    return absl::InternalError(
        absl::StrCat("result of step ", step_id, " where step ", step.id, " was expected"));
  }
  if (outcomes.size() != step.shares.size()) {
    return absl::InternalError(absl::StrCat("step ", step_id, " had ", step.shares.size(),
                                            " sequences, its result ", outcomes.size()));
  }
  for (size_t i = 0; i < outcomes.size(); ++i) {
    const Share& share = step.shares[i];
    const SequenceOutcome& outcome = outcomes[i];
    if (outcome.worker_sequence != share.worker_sequence) {
      return absl::InternalError(absl::StrCat("step ", step_id, " answers sequence ",
                                              outcome.worker_sequence, " in place of ",
                                              share.worker_sequence));
    }
    if (!TakesResults(share.sequence->state)) continue;
    const bool died = outcome.end == WorkerEnd::kNumericError;
    const size_t expected = share.sample && !died ? 1 : 0;
    const bool wrong_count = died ? outcome.tokens.size() > 1 : outcome.tokens.size() != expected;
    if (wrong_count || outcome.end == WorkerEnd::kInactive) {
      return absl::InternalError(absl::StrCat("step ", step_id, " sequence ", share.worker_sequence,
                                              ": ", outcome.tokens.size(), " tokens where ",
                                              expected, " were expected"));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<Progress>> Scheduler::Complete(
    uint64_t step_id, std::span<const SequenceOutcome> outcomes) {
  if (steps_.empty()) return absl::InternalError("a result without a step");
  RETURN_IF_ERROR(CheckAnswer(steps_.front(), step_id, outcomes));
  Step step = std::move(steps_.front());
  steps_.pop_front();
  step.state = StepState::kDone;
  std::vector<Progress> all;
  for (size_t i = 0; i < outcomes.size(); ++i) {
    const Share& share = step.shares[i];
    --share.sequence->steps_out;
    if (!TakesResults(share.sequence->state)) continue;
    Progress progress = Advance(share, outcomes[i]);
    progress.outcome = i;
    all.push_back(std::move(progress));
  }
  Settle(step);
  return all;
}

// Takes one sequence's result; ends the sequence where the result says so.
Progress Scheduler::Advance(const Share& share, const SequenceOutcome& outcome) {
  Sequence* sequence = share.sequence;
  Progress progress;
  progress.request = sequence->id;
  progress.cached_tokens = sequence->cached_tokens;
  if (outcome.end == WorkerEnd::kNumericError) {
    blocks_.Forget(sequence->tables);
    sequence->path.enabled = false;
    progress.end = SequenceEnd::kNumericError;
  } else {
    sequence->computed = share.end_position;
    sequence->tokens.insert(sequence->tokens.end(), outcome.tokens.begin(), outcome.tokens.end());
    progress.tokens = outcome.tokens;
    progress.prompt_done = sequence->computed >= sequence->prompt_tokens;
    blocks_.Publish(std::span<const uint32_t>(sequence->tokens).first(sequence->computed),
                    sequence->tables, &sequence->path);
    if (outcome.end == WorkerEnd::kStopToken) {
      progress.end = SequenceEnd::kStopToken;
    } else if (progress.prompt_done && sequence->generated() >= sequence->max_tokens) {
      progress.end = SequenceEnd::kLength;
    }
  }
  if (progress.end != SequenceEnd::kNone) {
    ReleaseFromWorker(sequence);
    Apply(sequence, SequenceEvent::kEnd);
  }
  return progress;
}

// Sequences on their way out that `step` was the last to use.
void Scheduler::Settle(const Step& step) {
  for (const Share& share : step.shares) {
    Sequence* sequence = share.sequence;
    if (sequence->steps_out == 0 && (sequence->state == SequenceState::kDraining ||
                                     sequence->state == SequenceState::kPreempting)) {
      BecomeIdle(sequence);
    }
  }
}

std::vector<RequestId> Scheduler::OpenRequests() const {
  std::vector<RequestId> open;
  for (const auto& [id, sequence] : sequences_) {
    if (IsOpen(sequence->state)) open.push_back(id);
  }
  std::sort(open.begin(), open.end());
  return open;
}

absl::StatusOr<std::vector<RequestId>> Scheduler::Fail(uint64_t step_id) {
  if (steps_.empty() || steps_.front().id != step_id) {
    return absl::InternalError(absl::StrCat("step ", step_id, " failed but is not the next one"));
  }
  Step step = std::move(steps_.front());
  steps_.pop_front();
  step.state = StepState::kFailed;
  for (const Share& share : step.shares) --share.sequence->steps_out;
  const std::vector<RequestId> open = OpenRequests();
  // Those that had ended before come to rest here, the others in EndSequence.
  std::vector<Sequence*> ended;
  for (const Share& share : step.shares) {
    if (share.sequence->state == SequenceState::kDraining && share.sequence->steps_out == 0) {
      ended.push_back(share.sequence);
    }
  }
  for (Sequence* sequence : ended) BecomeIdle(sequence);
  for (const RequestId id : open) EndSequence(sequences_.at(id).get());
  return open;
}

std::vector<RequestId> Scheduler::WorkerLost(bool forget_blocks) {
  const std::vector<RequestId> open = OpenRequests();
  steps_.clear();
  released_.clear();
  waiting_.Clear();
  for (auto& [id, sequence] : sequences_) {
    Apply(sequence.get(), SequenceEvent::kWorkerLost);
    GiveBackBlocks(sequence.get());
  }
  running_.clear();
  sequences_.clear();
  if (forget_blocks) blocks_ = KvBlocks(options_.groups, options_.prefix_cache);
  return open;
}

std::string Scheduler::Audit() const {
  std::vector<const BlockTables*> users;
  std::unordered_map<const Sequence*, int> shares;
  for (const Step& step : steps_) {
    for (const Share& share : step.shares) ++shares[share.sequence];
  }
  if (steps_.size() > kMaxStepsInFlight) return absl::StrCat(steps_.size(), " steps are out");
  size_t waiting = 0;
  for (const auto& [id, sequence] : sequences_) {
    const bool listed = std::count(running_.begin(), running_.end(), sequence.get()) == 1;
    const bool waits = sequence->state == SequenceState::kWaiting;
    waiting += waits ? 1 : 0;
    const std::string who =
        absl::StrCat("request ", id, " (", std::string(Name(sequence->state)), ")");
    if (waits == listed) return absl::StrCat(who, ": in the wrong list");
    if (sequence->state == SequenceState::kGone) return absl::StrCat(who, ": still on the books");
    if (sequence->steps_out != shares[sequence.get()]) {
      return absl::StrCat(who, ": counts ", sequence->steps_out, " steps out");
    }
    const bool leaving = sequence->state == SequenceState::kDraining ||
                         sequence->state == SequenceState::kPreempting;
    if (leaving && sequence->steps_out == 0) return absl::StrCat(who, ": should have left");
    if (waits && sequence->steps_out > 0) return absl::StrCat(who, ": waits with steps out");
    users.push_back(&sequence->tables);
  }
  if (waiting != waiting_.size()) return "the queue and the sequences disagree";
  if (waiting + running_.size() != sequences_.size()) return "a sequence is listed twice or not";
  return blocks_.Audit(users);
}

}  // namespace tandem::gateway
