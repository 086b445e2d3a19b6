#include "gateway/scheduling/step_table.h"

#include <array>

namespace tandem::gateway {
namespace {

constexpr std::optional<SequenceState> kNone = std::nullopt;
constexpr SequenceState kWaiting = SequenceState::kWaiting;
constexpr SequenceState kPrefill = SequenceState::kPrefill;
constexpr SequenceState kDecoding = SequenceState::kDecoding;
constexpr SequenceState kPreempting = SequenceState::kPreempting;
constexpr SequenceState kDraining = SequenceState::kDraining;
constexpr SequenceState kGone = SequenceState::kGone;

using Row = std::array<std::optional<SequenceState>, kSequenceStates>;

// [event][state]; columns: waiting, prefill, decoding, preempting, draining, gone.
constexpr std::array<Row, kSequenceEvents> kTable = {{
    /* schedule    */ {kPrefill, kNone, kNone, kNone, kNone, kNone},
    /* prompt sent */ {kNone, kDecoding, kNone, kNone, kNone, kNone},
    /* preempt     */ {kNone, kPreempting, kPreempting, kNone, kNone, kNone},
    /* end         */ {kGone, kDraining, kDraining, kDraining, kNone, kNone},
    /* idle        */ {kNone, kNone, kNone, kWaiting, kGone, kNone},
    /* worker lost */ {kGone, kGone, kGone, kGone, kGone, kNone},
}};

}  // namespace

std::optional<SequenceState> Next(SequenceState state, SequenceEvent event) {
  return kTable[static_cast<size_t>(event)][static_cast<size_t>(state)];
}

std::string_view Name(SequenceState state) {
  constexpr std::array<std::string_view, kSequenceStates> kNames = {
      "waiting", "prefill", "decoding", "preempting", "draining", "gone"};
  return kNames[static_cast<size_t>(state)];
}

std::string_view Name(SequenceEvent event) {
  constexpr std::array<std::string_view, kSequenceEvents> kNames = {
      "schedule", "prompt sent", "preempt", "end", "idle", "worker lost"};
  return kNames[static_cast<size_t>(event)];
}

}  // namespace tandem::gateway
