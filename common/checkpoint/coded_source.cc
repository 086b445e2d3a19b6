#include "common/checkpoint/coded_source.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/status.h"
#include "common/checkpoint/decode.h"

namespace tandem {
namespace {

class DecodedIntegers final : public MatrixSource {
 public:
  DecodedIntegers(std::unique_ptr<const CodedSource> inner, std::vector<int32_t> column_groups)
      : inner_(std::move(inner)), column_groups_(std::move(column_groups)) {}

  int64_t rows() const override { return inner_->rows(); }
  int64_t cols() const override { return inner_->cols(); }
  WeightFormat format() const override { return WeightFormat::kF32; }
  uint32_t group_columns() const override { return 0; }
  uint64_t stored_bytes() const override { return inner_->stored_bytes(); }
  const Checkpoint::Tensor& tensor() const override { return inner_->tensor(); }

  absl::Status ReadElements(Range rows, Range cols, void* out) const override {
    std::vector<uint8_t> codes(static_cast<size_t>(rows.size() * cols.size()));
    inner_->ReadCodeBytes(rows, cols, codes.data());
    const uint8_t* code = codes.data();
    auto* value = static_cast<float*>(out);
    for (int64_t row = rows.begin; row < rows.end; ++row) {
      int64_t group = -1;
      int zero = 0;
      float scale = 0;
      for (int64_t col = cols.begin; col < cols.end; ++col) {
        const int64_t own = GroupOf(col);
        if (own != group) {
          group = own;
          const GroupParameters parameters = inner_->Group(row, group);
          if (!IsUsableGroup(inner_->format(), parameters)) {
            return inner_->GroupError(row, group, "is not a finite number of usable size");
          }
          zero = static_cast<int>(parameters.min);
          scale = IntegerScale(inner_->format(), parameters);
        }
        *value++ = DecodeInteger(*code++, zero, scale);
      }
    }
    return absl::OkStatus();
  }

 private:
  int64_t GroupOf(int64_t col) const {
    if (!column_groups_.empty()) return column_groups_[static_cast<size_t>(col)];
    return inner_->group_columns() == 0 ? 0 : col / inner_->group_columns();
  }

  std::unique_ptr<const CodedSource> inner_;
  std::vector<int32_t> column_groups_;
};

}  // namespace

absl::Status CodedSource::ReadCodes(Range rows, Range cols, uint8_t* codes,
                                    GroupParameters* groups) const {
  ReadCodeBytes(rows, cols, codes);
  const int64_t first = shape_.group_columns == 0 ? 0 : cols.begin / shape_.group_columns;
  const int64_t end = first + GroupsTouched(static_cast<uint32_t>(cols.begin),
                                            static_cast<uint32_t>(cols.end), shape_.group_columns);
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    for (int64_t group = first; group < end; ++group) {
      GroupParameters parameters = Group(row, group);
      if (shape_.zero == ZeroPoint::kMiddle) {
        if (parameters.min != shape_.middle) {
          return GroupError(row, group,
                            absl::StrCat("has the zero point ", parameters.min,
                                         ", but quantization_config says that the weights are "
                                         "symmetric, zero point ",
                                         shape_.middle));
        }
        parameters.min = 0;
      }
      *groups++ = parameters;
    }
  }
  return absl::OkStatus();
}

std::shared_ptr<const MatrixSource> MakeDecodedIntegers(std::unique_ptr<const CodedSource> inner,
                                                        std::vector<int32_t> column_groups) {
  return std::make_shared<DecodedIntegers>(std::move(inner), std::move(column_groups));
}

}  // namespace tandem
