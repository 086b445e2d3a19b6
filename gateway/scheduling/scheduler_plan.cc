// Scheduler: how a step is put together.

#include <algorithm>
#include <utility>

#include "common/base/check.h"
#include "gateway/scheduling/scheduler.h"
#include "gateway/scheduling/sequence.h"

namespace tandem::gateway {

std::optional<StepPlan> Scheduler::Plan() {
  if (steps_.size() >= kMaxStepsInFlight) return std::nullopt;
  StepPlan plan;
  Step step;
  PlanDecodes(&plan, &step);
  PlanPrompts(&plan, &step);
  const bool worth_sending = !plan.sequences.empty() || (!released_.empty() && steps_.empty());
  if (!worth_sending) return std::nullopt;
  return Send(std::move(plan), std::move(step));
}

StepPlan Scheduler::PlanProbe() {
  TANDEM_CHECK(steps_.empty());
  return *Send({}, {});
}

std::optional<StepPlan> Scheduler::Send(StepPlan plan, Step step) {
  plan.step_id = step.id = next_id_++;
  plan.released = std::exchange(released_, {});
  steps_.push_back(std::move(step));
  return plan;
}

void Scheduler::PlanDecodes(StepPlan* plan, Step* step) {
  // MakeRoom may preempt sequences behind `i`, and those leave the list at once if idle.
  for (size_t i = 0; i < running_.size(); ++i) {
    Sequence* sequence = running_[i];
    if (sequence->state != SequenceState::kDecoding) continue;
    if (plan->decodes == options_.max_step_rows) break;
    if (sequence->samples_sent >= sequence->max_tokens) continue;
    if (!MakeRoom(sequence, uint64_t{sequence->next_position} + 1)) continue;
    AddShare(sequence, 1, true, plan, step);
    ++plan->decodes;
  }
}

void Scheduler::PlanPrompts(StepPlan* plan, Step* step) {
  plan->target_ns = chunks_.limit_ns();
  uint32_t budget = std::min(chunks_.Tokens(plan->decodes), options_.max_step_rows - plan->decodes);
  for (size_t i = 0; i < running_.size() && budget > 0; ++i) {
    Sequence* sequence = running_[i];
    if (sequence->state == SequenceState::kPrefill) {
      budget -= PlanChunk(sequence, budget, plan, step);
    }
  }
  StartWaiting(plan, step, budget);
}

void Scheduler::StartWaiting(StepPlan* plan, Step* step, uint32_t budget) {
  while (budget > 0) {
    const std::optional<RequestId> front = waiting_.Front();
    if (!front) return;
    Sequence* sequence = sequences_.at(*front).get();
    if (!CanStart(*sequence)) return;
    waiting_.Pop();
    Start(sequence);
    const uint32_t planned = PlanChunk(sequence, budget, plan, step);
    TANDEM_CHECK(planned > 0);
    budget -= planned;
  }
}

bool Scheduler::CanStart(const Sequence& sequence) const {
  const auto held_by_worker = std::count_if(running_.begin(), running_.end(),
                                            [](Sequence* s) { return TakesResults(s->state); });
  if (static_cast<uint64_t>(held_by_worker) >= options_.max_sequences) return false;
  if (running_.empty()) return true;
  for (size_t g = 0; g < blocks_.groups(); ++g) {
    uint64_t need = blocks_.BlocksFor(g, sequence.tokens.size());
    for (const Sequence* other : running_) {
      if (!TakesResults(other->state)) continue;
      // What others still need for their prompts, and a block to decode into.
      const uint32_t whole = blocks_.BlocksFor(g, other->prefill_end);
      const auto have = static_cast<uint32_t>(other->tables[g].size());
      need += (whole > have ? whole - have : 0) + 1;
    }
    // Prefix hits need no block of their own, but their blocks count as available until they are
    // taken: the sum is the same.
    if (need > blocks_.available(g)) return false;
  }
  return true;
}

void Scheduler::Start(Sequence* sequence) {
  Apply(sequence, SequenceEvent::kSchedule);
  const bool first = sequence->age == 0;
  if (first) sequence->age = next_age_++;
  sequence->worker_sequence = next_id_++;
  sequence->announced = false;
  sequence->blocks_sent.assign(blocks_.groups(), 0);
  sequence->prefill_end = static_cast<uint32_t>(sequence->tokens.size());
  sequence->samples_sent = sequence->generated();
  // The last token is always computed: its logits are what the next one is sampled from.
  const uint32_t block_tokens = options_.groups.empty() ? 1 : options_.groups.front().block_tokens;
  const uint32_t hit = blocks_.Match(sequence->tokens, (sequence->prefill_end - 1) / block_tokens,
                                     &sequence->path, &sequence->tables);
  sequence->next_position = sequence->computed = hit;
  if (first) sequence->cached_tokens = hit;
  const auto place =
      std::upper_bound(running_.begin(), running_.end(), sequence,
                       [](const Sequence* a, const Sequence* b) { return a->age < b->age; });
  running_.insert(place, sequence);
}

uint32_t Scheduler::PlanChunk(Sequence* sequence, uint32_t budget, StepPlan* plan, Step* step) {
  const uint32_t left = sequence->prefill_end - sequence->next_position;
  const uint32_t count = std::min(left, budget);
  if (!MakeRoom(sequence, uint64_t{sequence->next_position} + count)) return 0;
  const bool last = count == left;
  const bool sample = last && sequence->samples_sent < sequence->max_tokens;
  const uint32_t begin = sequence->next_position;
  PlannedSequence* planned = AddShare(sequence, count, sample, plan, step);
  planned->tokens.assign(sequence->tokens.begin() + begin,
                         sequence->tokens.begin() + begin + count);
  if (begin + count < sequence->prompt_tokens) {
    planned->next_prompt_id = sequence->tokens[begin + count];
  }
  if (last) Apply(sequence, SequenceEvent::kPromptSent);
  plan->prompt_tokens += count;
  return count;
}

PlannedSequence* Scheduler::AddShare(Sequence* sequence, uint32_t rows, bool sample, StepPlan* plan,
                                     Step* step) {
  PlannedSequence planned;
  planned.request = sequence->id;
  planned.worker_sequence = sequence->worker_sequence;
  planned.start = !sequence->announced;
  planned.start_position = sequence->next_position;
  planned.sample = sample;
  if (planned.start) {
    planned.generated.assign(sequence->tokens.begin() + sequence->prompt_tokens,
                             sequence->tokens.end());
  }
  planned.appended.resize(blocks_.groups());
  for (size_t g = 0; g < blocks_.groups(); ++g) {
    const std::vector<BlockId>& table = sequence->tables[g];
    planned.appended[g].assign(table.begin() + sequence->blocks_sent[g], table.end());
    sequence->blocks_sent[g] = static_cast<uint32_t>(table.size());
  }
  sequence->announced = true;
  sequence->next_position += rows;
  sequence->samples_sent += sample ? 1 : 0;
  ++sequence->steps_out;
  step->shares.push_back({.sequence = sequence,
                          .worker_sequence = sequence->worker_sequence,
                          .end_position = sequence->next_position,
                          .sample = sample});
  plan->sequences.push_back(std::move(planned));
  return &plan->sequences.back();
}

bool Scheduler::MakeRoom(Sequence* sequence, uint64_t tokens) {
  while (!blocks_.Extend(tokens, &sequence->tables)) {
    // Blocks of those on their way out come back with their last step: no need to take more.
    const bool coming = std::any_of(running_.begin(), running_.end(), [](const Sequence* s) {
      return s->state == SequenceState::kDraining || s->state == SequenceState::kPreempting;
    });
    if (coming || !PreemptYoungerThan(*sequence)) return false;
  }
  return true;
}

// A victim that has a share of the step under way gives its blocks back when that is done.
bool Scheduler::PreemptYoungerThan(const Sequence& sequence) {
  Sequence* victim = running_.back();
  if (victim->age <= sequence.age || !TakesResults(victim->state)) return false;
  ++preemptions_;
  Apply(victim, SequenceEvent::kPreempt);
  if (victim->steps_out == 0) BecomeIdle(victim);
  return true;
}

}  // namespace tandem::gateway
