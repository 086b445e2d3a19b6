// AWQ (GEMM version) and GPTQ (notes/models.md 5.4, 5.5): both store the transpose, inputs first,
// as 32-bit words, with a zero point and an F16 (or BF16) scale for every group of inputs and
// output:
//   AWQ   qweight [k, n * bits / 32]: a word holds outputs of one input, in an order of its own
//   GPTQ  qweight [k * bits / 32, n]: a word holds inputs of one output
//   both  qzeros [groups, n * bits / 32], scales [groups, n]
// A GPTQ checkpoint with act-order lists every input's group in g_idx.

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/status.h"
#include "common/checkpoint/scheme_parts.h"
#include "common/tensor/dtype.h"

namespace tandem {
namespace {

constexpr std::string_view kZeros[] = {".qzeros"};
constexpr std::string_view kScales[] = {".scales"};
constexpr std::string_view kGroupIndex[] = {".g_idx"};
constexpr int kWordBits = 32;
// Output 8 w + i of a word of AWQ lies at bits 4 * kAwqNibble[i]: the inverse of its packing order
// 0, 2, 4, 6, 1, 3, 5, 7.
constexpr int kAwqNibble[8] = {0, 4, 1, 5, 2, 6, 3, 7};

struct InputMajorLayout {
  CodedShape shape;
  bool is_awq = false;
  int bits = 4;
  uint32_t zero_offset = 0;  // added to stored zero points
  uint32_t code_xor = 0;     // 0x80: two's complement
  const Tensor* zeros = nullptr;
  const Tensor* scales = nullptr;
  int64_t groups = 1;
};

uint32_t Word(const Tensor& tensor, int64_t row, int64_t col) {
  uint32_t word = 0;
  std::memcpy(&word,
              tensor.view.As<const uint8_t>() +
                  (row * tensor.view.shape[1] + col) * static_cast<int64_t>(sizeof(word)),
              sizeof(word));
  return word;
}

// The eight nibbles of a word as bytes, the lowest first.
uint64_t SpreadNibbles(uint32_t word) {
  uint64_t x = word;
  x = (x | x << 16) & 0x0000ffff0000ffff;
  x = (x | x << 8) & 0x00ff00ff00ff00ff;
  return (x | x << 4) & 0x0f0f0f0f0f0f0f0f;
}

class InputMajorSource final : public CodedSource {
 public:
  explicit InputMajorSource(const InputMajorLayout& layout)
      : CodedSource(layout.shape), layout_(layout), per_word_(kWordBits / layout.bits) {
    for (int i = 0; i < per_word_; ++i) {
      shifts_[i] = layout.is_awq ? kAwqNibble[i] * layout.bits : i * layout.bits;
    }
  }

  // Words are walked along the dimension that they pack, each read once.
  void ReadCodeBytes(Range rows, Range cols, uint8_t* codes) const override {
    const Range packed = layout_.is_awq ? rows : cols;
    const Range other = layout_.is_awq ? cols : rows;
    const int64_t packed_stride = layout_.is_awq ? cols.size() : 1;
    const int64_t other_stride = layout_.is_awq ? 1 : cols.size();
    const uint32_t mask = (1u << layout_.bits) - 1;
    for (int64_t begin = packed.begin; begin < packed.end;) {
      const int64_t word_index = begin / per_word_;
      const int64_t end = std::min(packed.end, (word_index + 1) * per_word_);
      uint8_t* const to = codes + (begin - packed.begin) * packed_stride;
      for (int64_t at = other.begin; at < other.end; ++at) {
        const uint32_t word =
            layout_.is_awq ? Word(tensor(), at, word_index) : Word(tensor(), word_index, at);
        uint8_t* code = to + (at - other.begin) * other_stride;
        if (!layout_.is_awq && end - begin == kWordBits / 4) {
          const uint64_t bytes = SpreadNibbles(word);
          std::memcpy(code, &bytes, sizeof(bytes));
          continue;
        }
        for (int64_t i = begin % per_word_; i < begin % per_word_ + end - begin; ++i) {
          *code = static_cast<uint8_t>(((word >> shifts_[i]) & mask) ^ layout_.code_xor);
          code += packed_stride;
        }
      }
      begin = end;
    }
  }

  GroupParameters Group(int64_t row, int64_t group) const override {
    GroupParameters parameters;
    const auto bytes = static_cast<int64_t>(DTypeBytes(layout_.scales->view.dtype));
    std::memcpy(&parameters.scale,
                layout_.scales->view.As<const uint8_t>() + (group * rows() + row) * bytes,
                static_cast<size_t>(bytes));
    const uint32_t word = Word(*layout_.zeros, group, row / per_word_);
    const uint32_t mask = (1u << layout_.bits) - 1;
    parameters.min = ((word >> shifts_[row % per_word_]) & mask) + layout_.zero_offset;
    return parameters;
  }

  absl::Status GroupError(int64_t row, int64_t group, std::string_view what) const override {
    return TensorError(*layout_.scales,
                       absl::StrCat("element [", group, ",", row, "] ", std::string(what)));
  }

 private:
  InputMajorLayout layout_;
  int per_word_;
  int shifts_[8] = {};
};

absl::Status CheckShape(const Tensor& tensor, DType dtype, int64_t rows, int64_t cols) {
  if (tensor.view.dtype != dtype) return BadDType(tensor, "this quantization method");
  if (tensor.view.rank == 2 && tensor.view.shape[0] == rows && tensor.view.shape[1] == cols) {
    return absl::OkStatus();
  }
  return TensorError(tensor, absl::StrCat("shape is ", ShapeText(tensor.view), ", expected [", rows,
                                          ",", cols, "]"));
}

absl::Status CheckTensors(const MatrixRequest& request, InputMajorLayout& layout) {
  const int per_word = kWordBits / layout.bits;
  const int64_t row_words = DivideUp(request.rows, per_word);
  const int64_t qweight_rows = layout.is_awq ? request.cols : DivideUp(request.cols, per_word);
  RETURN_IF_ERROR(CheckShape(*layout.shape.tensor, DType::kI32, qweight_rows,
                             layout.is_awq ? row_words : request.rows));
  RETURN_IF_ERROR(CheckShape(*layout.zeros, DType::kI32, layout.groups, row_words));
  RETURN_IF_ERROR(
      CheckShape(*layout.scales, layout.scales->view.dtype, layout.groups, request.rows));
  for (const Tensor* tensor : {layout.shape.tensor, layout.zeros, layout.scales}) {
    layout.shape.stored_bytes +=
        static_cast<uint64_t>(tensor->view.Elements()) * DTypeBytes(tensor->view.dtype);
  }
  return absl::OkStatus();
}

// Symmetric 8-bit codes of GPTQ are stored with an offset of 128: kInt8 is two's complement. Zero
// points of 8 bits that are stored less one reach 256, which no format holds.
SourceOr Finish(InputMajorLayout layout, bool symmetric, std::vector<int32_t> column_groups) {
  const bool described =
      column_groups.empty() && (layout.bits == 4 || symmetric || layout.zero_offset == 0);
  layout.shape.zero = described && symmetric ? ZeroPoint::kMiddle : ZeroPoint::kExplicit;
  layout.shape.middle = 1u << (layout.bits - 1);
  ASSIGN_OR_RETURN(layout.shape.format,
                   IntegerFormat(*layout.scales, layout.bits, layout.shape.zero));
  if (layout.bits == 8 && layout.shape.zero != ZeroPoint::kExplicit) layout.code_xor = 0x80;
  auto source = std::make_unique<InputMajorSource>(layout);
  if (described) return std::shared_ptr<const MatrixSource>(std::move(source));
  return MakeDecodedIntegers(std::move(source), std::move(column_groups));
}

}  // namespace

SourceOr OpenInputMajor(const MatrixRequest& request, const Tensor& qweight) {
  const QuantScheme& scheme = request.scheme;
  const bool is_awq = scheme.method == QuantMethod::kAwq;
  if ((!is_awq && scheme.method != QuantMethod::kGptq) || scheme.weights.size() != 1) {
    return TensorError(qweight,
                       "needs a quantization_config whose quant_method is 'awq' or 'gptq'");
  }
  if (request.fused.step != 0) return TensorError(qweight, "is not a tensor of fused experts");
  const QuantizedWeights& weights = scheme.weights.front();
  if (weights.bits != 4 && (is_awq || weights.bits != 8)) {
    return TensorError(qweight, absl::StrCat("weights of ", weights.bits,
                                             " bits are not supported by this method"));
  }
  InputMajorLayout layout;
  layout.is_awq = is_awq;
  layout.bits = weights.bits;
  layout.zero_offset = !is_awq && scheme.zero_minus_one ? 1 : 0;
  layout.shape.rows = request.rows;
  layout.shape.cols = request.cols;
  layout.shape.group_columns = static_cast<uint32_t>(weights.group_columns);
  layout.shape.tensor = &qweight;
  layout.groups = weights.group_columns == 0 ? 1 : DivideUp(request.cols, weights.group_columns);
  ASSIGN_OR_RETURN(layout.zeros, GetBeside(request, qweight, kZeros));
  ASSIGN_OR_RETURN(layout.scales, GetBeside(request, qweight, kScales));
  RETURN_IF_ERROR(CheckTensors(request, layout));
  std::vector<int32_t> column_groups;
  if (const Tensor* index = FindBeside(request, kGroupIndex); index != nullptr && !is_awq) {
    layout.shape.stored_bytes += static_cast<uint64_t>(request.cols) * sizeof(int32_t);
    ASSIGN_OR_RETURN(column_groups,
                     ReadGroupIndex(*index, request.cols, layout.groups, weights.group_columns));
  }
  return Finish(layout, weights.symmetric, std::move(column_groups));
}

}  // namespace tandem
