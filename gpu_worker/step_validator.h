#pragma once

// Decides whether a Step from the gateway may be carried out, before anything is changed: every id,
// position, block and count is bounded, so that what runs afterwards may index without checks.
//
// Thread safety: none. Allocates nothing unless it refuses. Errors: INVALID_ARGUMENT naming the
// sequence and the field.

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "gpu_worker/sequence_table.h"
#include "tandem/worker/v1/gpu_worker.pb.h"

namespace tandem::gpu {

class StepValidator {
 public:
  explicit StepValidator(const SequenceLimits& limits);

  absl::Status Check(const worker::v1::Step& step, const SequenceTable& table);

 private:
  absl::Status CheckReleasesAndStarts(const worker::v1::Step& step, const SequenceTable& table);
  absl::Status CheckStart(const worker::v1::SequenceStart& start) const;
  absl::Status CheckSampling(const worker::v1::SequenceStart& start) const;
  absl::Status CheckCopies(const worker::v1::Step& step) const;
  absl::Status CheckSequence(const worker::v1::Step& step, const SequenceTable& table,
                             const worker::v1::SequenceStep& sequence, int64_t& rows);
  absl::Status CheckInput(const worker::v1::SequenceStep& sequence, const Sequence* known) const;
  absl::Status CheckPlace(const worker::v1::SequenceStep& sequence, const Sequence* known) const;
  // Marks the sequence as seen in this step and finds it: the table's record, or null when it
  // starts in this very step.
  absl::Status Locate(const worker::v1::Step& step, const SequenceTable& table, uint64_t id,
                      const Sequence*& known);

  const SequenceLimits limits_;
  std::vector<uint8_t> released_;    // a slot of the table
  std::vector<uint8_t> seen_;        // a slot of the table
  std::vector<uint8_t> start_seen_;  // an index of step.starts
};

}  // namespace tandem::gpu
