#pragma once

// What the quantized sources of safetensors files share: ReadCodes from a layout's own way to its
// code bytes and group parameters, and the presentation of integers that no WeightFormat describes.
//
// Thread safety, ownership, errors: as MatrixSource.

#include <cstdint>
#include <memory>
#include <vector>

#include "common/checkpoint/matrix_source.h"

namespace tandem {

// What to do with the zero point that a layout stores.
enum class ZeroPoint : uint8_t {
  kNone,      // the layout has none
  kExplicit,  // GroupParameters.min
  kMiddle,    // the config promises the middle code; anything else is refused
};

struct CodedShape {
  int64_t rows = 0;
  int64_t cols = 0;
  WeightFormat format = WeightFormat::kFp8;
  uint32_t group_columns = 0;
  ZeroPoint zero = ZeroPoint::kNone;
  uint32_t middle = 8;  // zero point of a symmetric scheme
  uint64_t stored_bytes = 0;
  const Checkpoint::Tensor* tensor = nullptr;
};

class CodedSource : public MatrixSource {
 public:
  explicit CodedSource(const CodedShape& shape) : shape_(shape) {}

  int64_t rows() const final { return shape_.rows; }
  int64_t cols() const final { return shape_.cols; }
  WeightFormat format() const final { return shape_.format; }
  uint32_t group_columns() const final { return shape_.group_columns; }
  uint64_t stored_bytes() const final { return shape_.stored_bytes; }
  const Checkpoint::Tensor& tensor() const final { return *shape_.tensor; }
  absl::Status ReadCodes(Range rows, Range cols, uint8_t* codes,
                         GroupParameters* groups) const final;

  // [rows.size(), cols.size()], one byte each.
  virtual void ReadCodeBytes(Range rows, Range cols, uint8_t* codes) const = 0;
  // As stored; `min` is the zero point where the layout has one, whatever shape().zero says.
  virtual GroupParameters Group(int64_t row, int64_t group) const = 0;

 private:
  CodedShape shape_;
};

// Integers with zero points whose columns' groups are listed (`column_groups`, [cols]: act-order),
// or whose zero points no format holds: a kF32 source of their values, (code - zero) * scale.
// REQUIRES: `inner` gives unsigned codes and ZeroPoint::kExplicit parameters, its format names the
// type of the scales; every group listed exists.
std::shared_ptr<const MatrixSource> MakeDecodedIntegers(std::unique_ptr<const CodedSource> inner,
                                                        std::vector<int32_t> column_groups);

}  // namespace tandem
