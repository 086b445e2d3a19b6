#pragma once

// Reads segments from a packed file into the pages of a store: see packed_file.h.

#include <string>

#include "absl/status/status.h"
#include "expert_worker/engine/store_manifest.h"
#include "expert_worker/engine/weight_store.h"

namespace tandem::expert {

// Fills data and table of checksums of the store `to` at `base` from the packed file `fd`, whose
// checked manifest is `from`, on `threads` threads. `path` is opened again, to read around the page
// cache. Errors: DATA_LOSS names the expert whose checksum differs, or where the file ended;
// CANCELLED.
struct StoreCopy {
  std::string path;
  int fd;
  StoreManifest from;
  StoreManifest to;
};
absl::Status ReadStore(const StoreCopy& copy, int threads, LoadProgress* progress, char* base);

}  // namespace tandem::expert
