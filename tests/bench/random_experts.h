#pragma once

// Experts whose values do not matter, made as fast as a store packs them.

#include <cstdint>

#include "common/tensor/weight_format.h"
#include "expert_worker/engine/expert_source.h"

namespace tandem::bench {

class RandomExperts final : public expert::ExpertSource {
 public:
  RandomExperts(WeightFormat format, uint32_t group_columns)
      : format_(format), group_columns_(group_columns) {}

  DType native_dtype() const override;
  absl::Status Read(int layer, int expert, ExpertPart part, Range rows, Range cols, DType dtype,
                    void* out) const override;

 private:
  const WeightFormat format_;
  const uint32_t group_columns_;
};

}  // namespace tandem::bench
