#pragma once

// Fills the data of a weight store from a checkpoint on all cores (oneTBB): each (layer, expert) is
// read, packed segment by segment and checksummed by one task. Reads only the worker's own rows and
// columns. The first error ends the work and is returned.

#include "absl/status/status.h"
#include "expert_worker/engine/weight_store.h"

namespace tandem::expert {

// `base` is the writable mapping of a file of manifest.file_bytes; writes data and table of
// checksums, not the manifest. Errors: those of `source`; CANCELLED when progress->cancel was set.
absl::Status PackExperts(const StoreManifest& manifest, const ExpertSource& source, int threads,
                         LoadProgress* progress, char* base);

// Compares the segments `range` of a mapped store with its table of checksums. DATA_LOSS names the
// expert. REQUIRES: the store holds the range.
absl::Status VerifyChecksums(const StoreManifest& manifest, SegmentRange range, const char* base);

}  // namespace tandem::expert
