#include "common/model/expert_tensors.h"

#include <string>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/status.h"
#include "common/model/model_tensors.h"

namespace tandem {
namespace {

constexpr int kParts = 3;

}  // namespace

absl::StatusOr<ExpertTensors> ExpertTensors::Create(const Checkpoint& checkpoint,
                                                    const ModelSpec& spec) {
  ExpertTensors tensors;
  tensors.hidden_ = spec.hidden;
  tensors.intermediate_ = spec.moe.intermediate;
  tensors.experts_ = spec.moe.experts;
  for (const LayerSpec& layer : spec.layers) {
    std::vector<WeightMatrix>& matrices = tensors.layers_.emplace_back();
    if (!layer.moe) continue;
    matrices.reserve(static_cast<size_t>(tensors.experts_) * kParts);
    for (int expert = 0; expert < tensors.experts_; ++expert) {
      for (const auto& [pattern, rows, cols] :
           {std::tuple(&layer.expert_gate, spec.moe.intermediate, spec.hidden),
            std::tuple(&layer.expert_up, spec.moe.intermediate, spec.hidden),
            std::tuple(&layer.expert_down, spec.hidden, spec.moe.intermediate)}) {
        ASSIGN_OR_RETURN(WeightMatrix matrix,
                         WeightMatrix::Create(checkpoint, ExpertTensorName(*pattern, expert), rows,
                                              cols, spec.quant));
        if (matrix.native_dtype() != DType::kBF16) tensors.native_dtype_ = DType::kF32;
        matrices.push_back(std::move(matrix));
      }
    }
  }
  return tensors;
}

bool ExpertTensors::has_layer(int layer) const {
  return layer >= 0 && static_cast<size_t>(layer) < layers_.size() && !layers_[layer].empty();
}

absl::Status ExpertTensors::Read(int layer, int expert, ExpertPart part, Range rows, Range cols,
                                 DType dtype, void* out) const {
  if (!has_layer(layer) || expert < 0 || expert >= experts_) {
    return absl::InvalidArgumentError(
        absl::StrCat("layer ", layer, " has no routed expert ", expert));
  }
  const WeightMatrix& matrix = layers_[layer][expert * kParts + static_cast<int>(part)];
  if (rows.size() < 0 || cols.size() < 0 || rows.size() > matrix.rows() ||
      cols.size() > matrix.cols()) {
    return absl::InvalidArgumentError("a range of an expert's rows or columns is out of bounds");
  }
  const size_t elements = static_cast<size_t>(rows.size() * cols.size());
  switch (dtype) {
    case DType::kF32:
      return matrix.ReadF32(rows, cols, {static_cast<float*>(out), elements});
    case DType::kBF16:
      return matrix.ReadBf16(rows, cols, {static_cast<uint16_t*>(out), elements});
    default:
      return absl::InvalidArgumentError(
          absl::StrCat("experts are read as F32 or BF16, not ", std::string(DTypeName(dtype))));
  }
}

}  // namespace tandem
