#include "common/model/model_loader.h"

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "common/base/status.h"
#include "common/checkpoint/quote.h"
#include "common/model/families/families.h"
#include "common/model/gguf_config.h"
#include "common/model/hub_config.h"
#include "common/model/model_files.h"
#include "common/model/model_tensors.h"
#include "common/model/quant_config.h"

namespace tandem {
namespace {

std::string SupportedTypes() {
  std::string text;
  for (const ModelFamily* family : Families()) {
    for (std::string_view type : family->model_types) {
      absl::StrAppend(&text, text.empty() ? "" : ", ", std::string(type));
    }
  }
  return text;
}

// The first of "architectures" only helps a message: model_type decides.
std::string ArchitectureText(const nlohmann::json& json) {
  const auto it = json.find("architectures");
  if (it == json.end() || !it->is_array() || it->empty() || !it->front().is_string()) return "";
  return absl::StrCat(" (architecture ", QuoteForMessage(it->front().get<std::string>()), ")");
}

void FillTokens(HubConfig& config, ModelSpec& spec) {
  spec.end_ids = config.TokenIds("eos_token_id");
  const std::vector<uint32_t> bos = config.TokenIds("bos_token_id");
  if (!bos.empty()) spec.bos_id = bos.front();
}

void FillTies(HubConfig& config, const ConfigSource& source, ModelSpec& spec) {
  spec.tied_embeddings = config.OptionalBool("tie_word_embeddings").value_or(!source.has_head);
  if (spec.tied_embeddings) spec.head = spec.embedding;
}

// ModelOpt may describe its quantization in a file of its own.
absl::Status AddModelOptScheme(const std::string& dir, ModelSpec& spec) {
  const std::string file = std::filesystem::path(dir) / "hf_quant_config.json";
  std::error_code error;
  if (spec.quant.method != QuantMethod::kNone || !std::filesystem::exists(file, error)) {
    return absl::OkStatus();
  }
  ASSIGN_OR_RETURN(const nlohmann::json json, ReadJsonObject(file));
  ASSIGN_OR_RETURN(spec.quant, ReadModelOptScheme(json, file));
  return absl::OkStatus();
}

void MergeIds(const std::vector<uint32_t>& more, std::vector<uint32_t>& ids) {
  ids.insert(ids.end(), more.begin(), more.end());
  std::sort(ids.begin(), ids.end());
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
}

}  // namespace

absl::StatusOr<ModelSpec> ParseModelSpec(std::string_view config_json, const ConfigSource& source) {
  ASSIGN_OR_RETURN(const nlohmann::json json, ParseJsonObject(config_json, source.file));
  return ModelSpecFromJson(json, source);
}

absl::StatusOr<ModelSpec> ModelSpecFromJson(const nlohmann::json& json,
                                            const ConfigSource& source) {
  HubConfig config(json, source.file);
  ModelSpec spec;
  spec.model_type = config.StringOr("model_type", "");
  RETURN_IF_ERROR(config.status());
  const ModelFamily* family = FindFamily(spec.model_type);
  if (family == nullptr) {
    return absl::UnimplementedError(absl::StrCat(
        source.file, ": model_type ", QuoteForMessage(spec.model_type), ArchitectureText(json),
        " is not supported; supported are ", SupportedTypes()));
  }
  family->fill(config, spec);
  spec.quant = ReadQuantScheme(config);
  FillTokens(config, spec);
  FillTies(config, source, spec);
  RETURN_IF_ERROR(config.status());
  MergeIds({}, spec.end_ids);
  return spec;
}

absl::StatusOr<ModelSpec> LoadModelSpec(const Checkpoint& checkpoint) {
  const GgufModel* const gguf = checkpoint.gguf();
  const std::string file = ConfigFile(checkpoint.dir(), gguf);
  ASSIGN_OR_RETURN(const nlohmann::json json, ReadModelConfig(checkpoint.dir(), gguf));
  const bool has_head = checkpoint.Find("lm_head.weight") != nullptr;
  ASSIGN_OR_RETURN(ModelSpec spec, ModelSpecFromJson(json, {.file = file, .has_head = has_head}));
  if (gguf != nullptr) {
    RETURN_IF_ERROR(ApplyGgufRopeFactors(*gguf, spec));
  } else {
    ASSIGN_OR_RETURN(const GenerationConfig generation, LoadGenerationConfig(checkpoint.dir()));
    MergeIds(generation.end_ids, spec.end_ids);
    RETURN_IF_ERROR(AddModelOptScheme(checkpoint.dir(), spec));
  }
  RETURN_IF_ERROR(CheckTensors(checkpoint, spec));
  return spec;
}

absl::StatusOr<GenerationConfig> LoadGenerationConfig(const std::string& dir) {
  GenerationConfig generation;
  const std::string file = std::filesystem::path(dir) / "generation_config.json";
  std::error_code error;
  if (!std::filesystem::exists(file, error)) return generation;
  ASSIGN_OR_RETURN(const nlohmann::json json, ReadJsonObject(file));
  HubConfig config(json, file);
  const auto real = [&config](std::string_view key, double above, double max) {
    const std::optional<double> value = config.OptionalReal(key, above, max);
    return value ? std::optional<float>(static_cast<float>(*value)) : std::nullopt;
  };
  constexpr double kBelowZero = -1e-9;  // bounds exclude their lower end
  generation.end_ids = config.TokenIds("eos_token_id");
  generation.do_sample = config.OptionalBool("do_sample");
  generation.temperature = real("temperature", kBelowZero, 100);
  generation.top_p = real("top_p", kBelowZero, 1);
  generation.min_p = real("min_p", kBelowZero, 1);
  generation.repetition_penalty = real("repetition_penalty", 0, 100);
  if (config.Has("top_k")) {
    generation.top_k = config.IntOr("top_k", 0, {.min = -1, .max = 1 << 24});
  }
  RETURN_IF_ERROR(config.status());
  return generation;
}

}  // namespace tandem
