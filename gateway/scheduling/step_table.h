#pragma once

// The step state machine as a table: what may happen to a sequence, to a step and to a block, and
// nothing else. The scheduler changes states only through Next(), so an event that the table does
// not allow is a programmer error and shows at once.
//
// Sequence                  step in flight?   owns blocks
//   waiting     in the queue        no          none
//   prefill     prompt not yet all sent         yes
//   decoding    prompt sent; one row a step     yes
//   preempting  gave up its place: takes the results in flight, then waits again
//   draining    has ended: results in flight are dropped, then it is gone
//   gone        forgotten
//
// Event                     waiting  prefill     decoding    preempting  draining
//   schedule                prefill  -           -           -           -
//   prompt sent             -        decoding    -           -           -
//   preempt                 -        preempting  preempting  -           -
//   end (stop, length,      gone     draining    draining    draining    -
//     cancel, step failed)
//   idle (nothing in        -        -           -           waiting     gone
//     flight uses it)
//   worker lost             gone     gone        gone        gone        gone
//
// A step is sent, then done or failed; results come in the order sent and at most kMaxStepsInFlight
// are out. "Step done" and "step failed" act on a sequence through its count of steps in flight:
// when that falls to 0 in preempting or draining, "idle" follows. A stop string that is found one
// step late and a client that leaves are "end" with a step in flight; a new epoch is "worker lost".
//
// Owner of a block: the free list; the prefix cache (nobody uses it, its content is known); or
// sequences (one, or several that share a cached prefix). Blocks of a sequence leave it only on
// "idle" or "worker lost", so never while a step in flight may touch them.

#include <cstdint>
#include <optional>
#include <string_view>

namespace tandem::gateway {

inline constexpr int kMaxStepsInFlight = 2;

enum class SequenceState : uint8_t { kWaiting, kPrefill, kDecoding, kPreempting, kDraining, kGone };
inline constexpr int kSequenceStates = 6;

enum class SequenceEvent : uint8_t { kSchedule, kPromptSent, kPreempt, kEnd, kIdle, kWorkerLost };
inline constexpr int kSequenceEvents = 6;

enum class StepState : uint8_t { kSent, kDone, kFailed };

// The state after `event`, or nothing where the table has no entry.
std::optional<SequenceState> Next(SequenceState state, SequenceEvent event);

// Whether a request in this state still owes its client a terminal event.
constexpr bool IsOpen(SequenceState state) {
  return state != SequenceState::kDraining && state != SequenceState::kGone;
}

// Whether results of steps in flight count for this sequence.
constexpr bool TakesResults(SequenceState state) {
  return state == SequenceState::kPrefill || state == SequenceState::kDecoding ||
         state == SequenceState::kPreempting;
}

std::string_view Name(SequenceState state);
std::string_view Name(SequenceEvent event);

}  // namespace tandem::gateway
