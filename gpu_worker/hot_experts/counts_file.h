#pragma once

// ExpertCounts between two lives of the gpu worker: a small file in the state directory, written
// whole under another name and renamed, so that a reader sees an old or a new one.
//
// Thread safety: none needed; one process writes a file. Errors: NOT_FOUND (no file yet), DATA_LOSS
// (torn, checksum, counts that cannot be), FAILED_PRECONDITION (of another model, shape or version,
// or the file system's refusal); each names the file.

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "gpu_worker/hot_experts/expert_counts.h"

namespace tandem::gpu {

// The file of a model in the state directory.
std::string CountsPath(const std::string& state_dir, uint64_t model_hash);

// Makes missing directories.
absl::Status SaveCounts(const std::string& path, uint64_t model_hash, const ExpertCounts& counts);

// Fills `counts`, which is left as it was after an error.
absl::Status LoadCounts(const std::string& path, uint64_t model_hash, ExpertCounts* counts);

}  // namespace tandem::gpu
