#include "common/quantize/quantize_plan.h"

#include <algorithm>
#include <array>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "common/base/status.h"
#include "common/checkpoint/quote.h"
#include "common/quantize/packed_tensors.h"
#include "common/quantize/quantization_config.h"

namespace tandem {
namespace {

using Action = QuantizeItem::Action;
using Json = nlohmann::ordered_json;

constexpr std::string_view kWeight = ".weight";
constexpr std::string_view kExperts = ".experts.";
constexpr uint32_t kSmallestGroup = 32;

std::string_view LastPart(std::string_view module) {
  return module.substr(module.rfind('.') + 1);  // all of it where there is no dot
}

std::string_view WithoutWeight(std::string_view name) {
  return name.substr(0, name.size() - kWeight.size());
}

uint64_t BytesOf(const Checkpoint::Tensor& tensor) {
  return static_cast<uint64_t>(tensor.view.Elements()) * DTypeBytes(tensor.view.dtype);
}

bool IsMatrixOfFloats(const Checkpoint::Tensor& tensor) {
  const DType dtype = tensor.view.dtype;
  return tensor.view.rank == 2 && (dtype == DType::kF32 || dtype == DType::kF16 ||
                                   dtype == DType::kBF16 || dtype == DType::kF8E4M3);
}

// Scales of an FP8 weight go with it.
bool BelongsToFp8Weight(const Checkpoint& checkpoint, std::string_view name) {
  for (const std::string_view suffix :
       {".weight_scale_inv", ".weight_scale", ".scale", ".input_scale"}) {
    if (!name.ends_with(suffix)) continue;
    const std::string weight =
        std::string(name.substr(0, name.size() - suffix.size())) + std::string(kWeight);
    const auto* const tensor = checkpoint.Find(weight);
    return tensor != nullptr && tensor->view.dtype == DType::kF8E4M3;
  }
  return false;
}

// The largest half, quarter ... of the group, at least 32, that divides the columns.
absl::StatusOr<EncodeTarget> FitTarget(const Checkpoint::Tensor& tensor, EncodeTarget target) {
  const int64_t rows = tensor.view.shape[0];
  const int64_t cols = tensor.view.shape[1];
  absl::Status fits = CheckPackable(target, rows, cols);
  while (!fits.ok() && target.format != WeightFormat::kMxfp4 && target.group_rows == 1 &&
         target.group_columns / 2 >= kSmallestGroup) {
    target.group_columns /= 2;
    fits = CheckPackable(target, rows, cols);
  }
  if (!fits.ok()) {
    return TensorError(tensor, absl::StrCat(std::string(fits.message()), " or fewer, down to ",
                                            kSmallestGroup, "; it cannot be quantized so"));
  }
  return target;
}

absl::StatusOr<QuantScheme> SourceScheme(const Json& config, const std::string& dir) {
  QuantScheme scheme;
  const auto found = config.find("quantization_config");
  if (found == config.end() || found->is_null()) return scheme;
  const std::string where = dir + "/config.json: quantization_config: ";
  if (!found->is_object()) return absl::InvalidArgumentError(where + "is not an object");
  const auto method = found->find("quant_method");
  if (method == found->end() || *method != "fp8") {
    return absl::InvalidArgumentError(
        absl::StrCat(where, "quant_method is ",
                     method == found->end() ? "missing" : QuoteForMessage(method->dump()),
                     "; only unquantized and fp8 checkpoints can be quantized"));
  }
  scheme.method = QuantMethod::kFp8;
  const auto block = found->find("weight_block_size");
  if (block == found->end() || block->is_null()) return scheme;
  const auto side = [&](size_t i) {
    return block->size() == 2 && (*block)[i].is_number_unsigned() ? (*block)[i].get<uint32_t>() : 0;
  };
  scheme.block = {side(0), side(1)};
  if (!block->is_array() || scheme.block.rows == 0 || scheme.block.cols == 0) {
    return absl::InvalidArgumentError(where + "weight_block_size is not [rows, columns]");
  }
  return scheme;
}

class Planner {
 public:
  Planner(const Checkpoint& checkpoint, const EncodeTarget& target, QuantizeScope scope)
      : checkpoint_(checkpoint), target_(target), scope_(scope) {}

  absl::Status AddFile(const SafetensorsFile& file) {
    QuantizeFile& planned = plan_.files.emplace_back();
    planned.name = file.path().substr(file.path().rfind('/') + 1);
    for (const SafetensorsEntry& entry : file.entries()) {
      ASSIGN_OR_RETURN(const Checkpoint::Tensor* tensor, checkpoint_.Get(entry.name));
      if (BelongsToFp8Weight(checkpoint_, entry.name)) continue;
      plan_.source_bytes += BytesOf(*tensor);
      RETURN_IF_ERROR(AddTensor(*tensor, planned));
    }
    return absl::OkStatus();
  }

  absl::StatusOr<QuantizePlan> Finish(const Json& config) {
    if (plan_.quantized_matrices == 0) {
      return absl::InvalidArgumentError(absl::StrCat(
          checkpoint_.dir(), ": has no tensor ",
          scope_ == QuantizeScope::kExperts ? "'...experts.<number>....weight'; --scope linears "
                                              "quantizes the linears of dense layers"
                                            : "'...layers....weight' that is a linear"));
    }
    plan_.config = config;
    ASSIGN_OR_RETURN(plan_.config["quantization_config"], MakeQuantizationConfig(plan_.files));
    return std::move(plan_);
  }

  QuantizePlan& plan() { return plan_; }

 private:
  bool IsChosen(const Checkpoint::Tensor& tensor) const {
    if (!IsMatrixOfFloats(tensor)) return false;
    return scope_ == QuantizeScope::kExperts ? IsRoutedExpertWeight(tensor.name)
                                             : IsLayerLinearWeight(tensor.name);
  }

  absl::Status AddTensor(const Checkpoint::Tensor& tensor, QuantizeFile& file) {
    if (tensor.view.rank == 3 && tensor.name.find(".experts") != std::string_view::npos) {
      return TensorError(tensor,
                         "holds all experts of a layer; only checkpoints with tensors of their own "
                         "for each expert can be quantized");
    }
    QuantizeItem item;
    item.source = &tensor;
    item.first_output = file.outputs.size();
    if (IsChosen(tensor)) {
      RETURN_IF_ERROR(AddQuantized(tensor, item, file));
    } else {
      TensorToWrite output = {std::string(tensor.name), tensor.view.dtype, {}};
      output.shape.assign(tensor.view.shape.begin(), tensor.view.shape.begin() + tensor.view.rank);
      if (output.dtype == DType::kF8E4M3) {
        if (tensor.view.rank != 2 || !tensor.name.ends_with(kWeight)) {
          return TensorError(tensor, "is FP8 but not a matrix called '....weight'");
        }
        item.action = Action::kWriteBf16;
        output.dtype = DType::kBF16;
      }
      file.outputs.push_back(std::move(output));
    }
    file.items.push_back(std::move(item));
    return absl::OkStatus();
  }

  absl::Status AddQuantized(const Checkpoint::Tensor& tensor, QuantizeItem& item,
                            QuantizeFile& file) {
    item.action = Action::kQuantize;
    ASSIGN_OR_RETURN(item.target, FitTarget(tensor, target_));
    ++plan_.quantized_matrices;
    plan_.quantized_source_bytes += BytesOf(tensor);
    for (PackedTensor& packed :
         PackedTensors(*item.target, tensor.view.shape[0], tensor.view.shape[1])) {
      file.outputs.push_back({absl::StrCat(std::string(item.module()), ".", packed.suffix),
                              packed.dtype, std::move(packed.shape)});
      plan_.quantized_output_bytes += file.outputs.back().Bytes();
    }
    return absl::OkStatus();
  }

  const Checkpoint& checkpoint_;
  const EncodeTarget target_;
  const QuantizeScope scope_;
  QuantizePlan plan_;
};

}  // namespace

std::string_view QuantizeItem::module() const { return WithoutWeight(source->name); }

uint64_t QuantizeFile::OutputBytes() const {
  uint64_t bytes = SafetensorsHeader(outputs).size();
  for (const TensorToWrite& output : outputs) bytes += output.Bytes();
  return bytes;
}

bool IsRoutedExpertWeight(std::string_view name) {
  const size_t at = name.find(kExperts);
  if (at == std::string_view::npos || !name.ends_with(kWeight)) return false;
  const std::string_view number = name.substr(at + kExperts.size());
  const size_t digits = number.find('.');
  return digits > 0 && digits != std::string_view::npos &&
         std::all_of(number.begin(), number.begin() + digits, absl::ascii_isdigit) &&
         digits + kWeight.size() < number.size();
}

bool IsLayerLinearWeight(std::string_view name) {
  // Routers and what else is a matrix in a layer (multi-token prediction has embeddings there).
  constexpr std::array<std::string_view, 7> kOthers = {
      "gate", "router", "shared_expert_gate", "embed_tokens", "head", "lm_head", "wte"};
  if (!name.ends_with(kWeight) || name.find(".layers.") == std::string_view::npos) return false;
  const std::string_view part = LastPart(WithoutWeight(name));
  return std::find(kOthers.begin(), kOthers.end(), part) == kOthers.end();
}

absl::StatusOr<QuantizePlan> PlanQuantize(const Checkpoint& checkpoint, const Json& config,
                                          const EncodeTarget& target, QuantizeScope scope) {
  Planner planner(checkpoint, target, scope);
  ASSIGN_OR_RETURN(planner.plan().source_scheme, SourceScheme(config, checkpoint.dir()));
  for (const auto& file : checkpoint.files()) RETURN_IF_ERROR(planner.AddFile(*file));
  return planner.Finish(config);
}

}  // namespace tandem
