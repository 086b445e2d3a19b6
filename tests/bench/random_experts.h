#pragma once

// Experts whose values do not matter (but are finite and small), made as fast as a store packs
// them. Knows no format by name: what codes and parameters may be follows from its traits.

#include <cstdint>

#include "common/tensor/weight_format.h"
#include "expert_worker/engine/expert_source.h"

namespace tandem::bench {

class RandomExperts final : public expert::ExpertSource {
 public:
  explicit RandomExperts(const expert::MatrixFormat& format) : format_(format) {}

  expert::MatrixFormat format(const expert::ExpertMatrix&) const override { return format_; }
  absl::Status ReadElements(const expert::ExpertMatrix& matrix, Range rows, Range cols,
                            WeightFormat plain, void* out) const override;
  absl::Status ReadCodes(const expert::ExpertMatrix& matrix, Range rows, Range cols, uint8_t* codes,
                         GroupParameters* groups) const override;
  absl::Status ReadBias(const expert::ExpertMatrix& matrix, Range rows, float* out) const override;

 private:
  const expert::MatrixFormat format_;
};

}  // namespace tandem::bench
