// What stands between a slot and the code that indexes by its contents. Everything in a slot was
// written by another process: headers are checked after CopyOnce, picks are checked while they are
// copied into private memory.
//
// Pure, allocation-free, safe on any bytes; thread-safe.
#pragma once

#include <cstdint>

#include "common/shm/layout.h"

namespace tandem::shm {

// Why a slot was refused; goes back in DoneLine::replies.
enum class RefuseCode : uint32_t {
  kAccepted = 0,
  kStale = 1,    // sequence or epoch is not the expected one, or the header is half-written
  kShape = 2,    // lane, layer, rows, top_k, hidden or row type out of bounds
  kLength = 3,   // a byte count does not follow from the shape
  kExpert = 4,   // an expert id is neither below num_experts nor kNoExpert
  kUnknown = 5,  // only on the reader's side: a code that this release does not know
};
const char* RefuseText(RefuseCode code);

// Fills all fields, sequence_again last in memory order of the caller's copy.
SlotHeader MakeHeader(const BatchLimits& limits, uint64_t sequence, uint64_t epoch, uint64_t step,
                      uint32_t lane, uint32_t layer, uint32_t rows, uint32_t flags,
                      bool has_deferred);

// `header` is a private copy.
RefuseCode CheckHeader(const SlotHeader& header, const BatchLimits& limits, uint64_t sequence,
                       uint64_t epoch);

// The private picks of one batch; arrays have room for max_rows * top_k.
struct PickBuffers {
  uint16_t* ids = nullptr;
  float* weights = nullptr;
  uint8_t* deferred = nullptr;
};

// Copies picks [begin, end) out of shared memory, each read once; false when an id is out of range.
// `deferred` may be null (none); its copy is 0 or 1.
bool CopyPicks(const uint16_t* ids, const float* weights, const uint8_t* deferred, uint64_t begin,
               uint64_t end, uint32_t num_experts, const PickBuffers& to);

}  // namespace tandem::shm
