#pragma once

// Reads segments from a packed file into the pages of a store: see packed_file.h.

#include <string>

#include "absl/status/status.h"
#include "expert_worker/engine/store_manifest.h"
#include "expert_worker/engine/weight_store.h"

namespace tandem::expert {

struct StoreCopy {
  std::string path;    // of the packed file; opened again, to read around the page cache
  int fd;              // of the packed file
  StoreManifest from;  // its checked manifest
  int store_fd;
  StoreManifest to;
};

// Fills data and table of checksums of the store, mapped at `base`, on `threads` threads.
// Errors: DATA_LOSS names the expert whose checksum differs, or where the file ended; CANCELLED;
// RESOURCE_EXHAUSTED for memory.
absl::Status ReadStore(const StoreCopy& copy, int threads, LoadProgress* progress, char* base);

}  // namespace tandem::expert
