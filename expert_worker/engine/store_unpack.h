#pragma once

// An expert out of the packed stores that hold it: the inverse of packing, exact. A store holds a
// range of segments, so an expert comes from the stores of all workers.
//
// Thread safety: pure; stores are immutable. Errors: FAILED_PRECONDITION when the stores are not
// all segments of one model, each once.

#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "common/tensor/expert_weights.h"
#include "expert_worker/engine/weight_store.h"

namespace tandem::expert {

// Whether the stores together hold all segments, in order; a store may hold none.
absl::Status CheckComplete(std::span<const WeightStore* const> stores);

// REQUIRES: CheckComplete(stores), has_layer(layer), expert in range. `out` is overwritten; its
// memory is reused.
void UnpackExpert(std::span<const WeightStore* const> stores, uint32_t layer, uint32_t expert,
                  CanonicalExpert* out);

}  // namespace tandem::expert
