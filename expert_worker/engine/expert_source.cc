#include "expert_worker/engine/expert_source.h"

namespace tandem::expert {

MatrixFormat CheckpointExperts::format(const ExpertMatrix& matrix) const {
  const WeightMatrix& m = Find(matrix);
  return {m.format(), m.group_columns()};
}

absl::Status CheckpointExperts::ReadElements(const ExpertMatrix& matrix, Range rows, Range cols,
                                             WeightFormat plain, void* out) const {
  const WeightMatrix& m = Find(matrix);
  const auto elements = static_cast<size_t>(rows.size() * cols.size());
  if (plain == WeightFormat::kF32) {
    return m.ReadF32(rows, cols, {static_cast<float*>(out), elements});
  }
  if (plain == WeightFormat::kBf16) {
    return m.ReadBf16(rows, cols, {static_cast<uint16_t*>(out), elements});
  }
  return m.ReadElements(rows, cols, out);
}

absl::Status CheckpointExperts::ReadCodes(const ExpertMatrix& matrix, Range rows, Range cols,
                                          uint8_t* codes, GroupParameters* groups) const {
  return Find(matrix).ReadCodes(rows, cols, codes, groups);
}

}  // namespace tandem::expert
