#include "common/checkpoint/row_major.h"

#include <bit>
#include <cstring>
#include <string>

#include "absl/strings/str_cat.h"
#include "common/base/status.h"
#include "common/tensor/convert.h"

namespace tandem {
namespace {

template <typename T>
T Load(const Checkpoint::Tensor& tensor, int64_t index) {
  T value;
  std::memcpy(&value, tensor.view.As<const uint8_t>() + index * static_cast<int64_t>(sizeof(T)),
              sizeof(T));
  return value;
}

// The bits of a scale as `format` stores it: FP8 scales of every type as F32, exactly; others raw.
uint32_t ScaleBits(const Checkpoint::Tensor& scale, int64_t index, WeightFormat format) {
  const size_t bytes = DTypeBytes(scale.view.dtype);
  if (format == WeightFormat::kFp8) {
    float value = 0;
    ConvertToF32(scale.view.dtype,
                 scale.view.As<const uint8_t>() + index * static_cast<int64_t>(bytes), 1, &value);
    return std::bit_cast<uint32_t>(value);
  }
  if (bytes == sizeof(uint8_t)) return Load<uint8_t>(scale, index);
  if (bytes == sizeof(uint16_t)) return Load<uint16_t>(scale, index);
  return Load<uint32_t>(scale, index);
}

// Codes [begin, end) of a row. The middle is a loop over whole bytes, which the compiler
// vectorizes.
void UnpackNibbles(const uint8_t* row, Range cols, uint8_t* __restrict out) {
  int64_t col = cols.begin;
  if (col % 2 != 0 && col < cols.end) *out++ = row[col++ / 2] >> 4;
  const uint8_t* const bytes = row + col / 2;
  const int64_t count = (cols.end - col) / 2;
  for (int64_t i = 0; i < count; ++i) {
    out[2 * i] = bytes[i] & 0xf;
    out[2 * i + 1] = bytes[i] >> 4;
  }
  if ((cols.end - col) % 2 != 0) out[2 * count] = bytes[count] & 0xf;
}

class RowMajorSource final : public CodedSource {
 public:
  explicit RowMajorSource(const RowMajorLayout& layout)
      : CodedSource(layout.shape), layout_(layout) {}

  void ReadCodeBytes(Range rows, Range cols, uint8_t* codes) const override {
    for (int64_t row = rows.begin; row < rows.end; ++row, codes += cols.size()) {
      const uint8_t* const from =
          tensor().view.As<const uint8_t>() + layout_.place.At(row, 1) * layout_.row_bytes;
      if (layout_.code_bits == 4) {
        UnpackNibbles(from, cols, codes);
        continue;
      }
      if (cols.size() > 0) std::memcpy(codes, from + cols.begin, static_cast<size_t>(cols.size()));
      if (layout_.code_xor == 0) continue;
      for (int64_t i = 0; i < cols.size(); ++i) codes[i] ^= layout_.code_xor;
    }
  }

  GroupParameters Group(int64_t row, int64_t group) const override {
    return {.scale = ScaleBits(*layout_.scale, ScaleIndex(row, group), format()),
            .min = Zero(row, group),
            .super = layout_.super};
  }

  absl::Status GroupError(int64_t row, int64_t group, std::string_view what) const override {
    const int64_t index = ScaleIndex(row, group);
    return TensorError(*layout_.scale,
                       absl::StrCat("element [", index / layout_.scale_width, ",",
                                    index % layout_.scale_width, "] ", std::string(what)));
  }

 private:
  int64_t ScaleIndex(int64_t row, int64_t group) const {
    if (layout_.scale_rows == 0) return group;
    return layout_.place.At(row, layout_.scale_rows) * layout_.scale_width + group;
  }

  uint32_t Zero(int64_t row, int64_t group) const {
    switch (layout_.zero_layout) {
      case ZeroLayout::kNone:
        return layout_.implied_zero;
      case ZeroLayout::kInt8:
        return Load<uint8_t>(*layout_.zeros, row * layout_.scale_width + group) ^ 0x80u;
      case ZeroLayout::kPackedRows: {
        const int64_t bit = row * layout_.code_bits;
        const auto word = Load<uint32_t>(*layout_.zeros, bit / 32 * layout_.scale_width + group);
        return (word >> (bit % 32)) & ((1u << layout_.code_bits) - 1);
      }
    }
    return 0;
  }

  RowMajorLayout layout_;
};

}  // namespace

absl::StatusOr<RowPlace> RowPlace::Find(const MatrixRequest& request,
                                        const Checkpoint::Tensor& codes) {
  RowPlace place;
  place.rows_ = request.rows;
  place.tensor_rows_ = request.rows;
  if (request.fused.step == 0) return place;
  const int64_t base = request.fused.base;
  place.fused_ = true;
  place.step_ = request.fused.step;
  if (codes.view.rank >= 3 && base >= 0 && place.step_ > 0 && codes.view.shape[1] > 0) {
    place.matrices_ = codes.view.shape[0];
    place.tensor_rows_ = codes.view.shape[1];
    place.matrix_ = base / place.tensor_rows_;
    place.first_ = base % place.tensor_rows_;
    const int64_t room = place.tensor_rows_ - 1 - place.first_;
    if (place.matrix_ < place.matrices_ && request.rows - 1 <= room / place.step_) return place;
  }
  return TensorError(codes,
                     absl::StrCat("shape is ", ShapeText(codes.view), ": has no ", request.rows,
                                  " rows from row ", base, " by steps of ", place.step_));
}

absl::Status RowPlace::Check(const Checkpoint::Tensor& tensor, int64_t block_rows, int64_t width,
                             std::string_view what) const {
  const int64_t want_rows = DivideUp(tensor_rows_, block_rows);
  const TensorView& view = tensor.view;
  const std::string want = absl::StrCat(want_rows, ",", width, "] for ", std::string(what));
  if (!fused_) {
    if (view.rank == 2 && view.shape[0] == want_rows && view.shape[1] == width) {
      return absl::OkStatus();
    }
    return TensorError(tensor, absl::StrCat("shape is ", ShapeText(view), ", expected [", want));
  }
  if (view.rank >= 3 && view.shape[0] == matrices_ && view.shape[1] == want_rows &&
      view.Elements() == matrices_ * want_rows * width) {
    return absl::OkStatus();
  }
  return TensorError(
      tensor, absl::StrCat("shape is ", ShapeText(view), ", expected [", matrices_, ",", want));
}

bool RowPlace::IsColumn(const Checkpoint::Tensor& tensor, int64_t block_rows) const {
  const TensorView& view = tensor.view;
  const int64_t want_rows = DivideUp(tensor_rows_, block_rows);
  if (!fused_) return view.rank == 1 && view.shape[0] == want_rows;
  return view.rank == 2 && view.shape[0] == matrices_ && view.shape[1] == want_rows;
}

uint64_t RowPlace::ShareOf(const Checkpoint::Tensor& tensor) const {
  const uint64_t bytes =
      static_cast<uint64_t>(tensor.view.Elements()) * DTypeBytes(tensor.view.dtype);
  if (!fused_) return bytes;
  return bytes * static_cast<uint64_t>(rows_) / static_cast<uint64_t>(matrices_ * tensor_rows_);
}

std::unique_ptr<const CodedSource> MakeRowMajor(const RowMajorLayout& layout) {
  return std::make_unique<RowMajorSource>(layout);
}

}  // namespace tandem
