#include "gateway/api/generation_defaults.h"

#include <fstream>
#include <iterator>
#include <optional>
#include <string>

#include "common/base/status.h"
#include "gateway/api/request_builder.h"
#include "gateway/api/request_json.h"

namespace tandem::gateway {
namespace {

// Real files have a few hundred bytes.
constexpr size_t kMaxFileBytes = size_t{1} << 20;

}  // namespace

absl::StatusOr<GenerationDefaults> ParseGenerationDefaults(std::string_view json,
                                                           std::string_view source) {
  const auto read = [&]() -> absl::StatusOr<GenerationDefaults> {
    ASSIGN_OR_RETURN(const Json document, ParseRequestJson(json));
    FieldReader reader(document);
    GenerationFields fields;
    reader.Number("temperature", &fields.temperature);
    reader.Integer("top_k", &fields.top_k);
    reader.Number("top_p", &fields.top_p);
    reader.Number("min_p", &fields.min_p);
    reader.Number("repetition_penalty", &fields.repetition_penalty);
    RETURN_IF_ERROR(reader.status());
    ASSIGN_OR_RETURN(const SamplingOptions checked, BuildSampling(fields, {}, UINT32_MAX));
    GenerationDefaults defaults;
    defaults.temperature = fields.temperature.value_or(defaults.temperature);
    defaults.top_k = checked.top_k;
    defaults.top_p = fields.top_p.value_or(defaults.top_p);
    defaults.min_p = fields.min_p.value_or(defaults.min_p);
    defaults.repetition_penalty = fields.repetition_penalty.value_or(defaults.repetition_penalty);
    return defaults;
  };
  absl::StatusOr<GenerationDefaults> defaults = read();
  if (!defaults.ok()) return Annotate(defaults.status(), source);
  return defaults;
}

absl::StatusOr<GenerationDefaults> LoadGenerationDefaults(const std::filesystem::path& model_dir) {
  const std::filesystem::path path = model_dir / "generation_config.json";
  std::ifstream file(path, std::ios::binary);
  if (!file) return GenerationDefaults{};
  std::string text(kMaxFileBytes + 1, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<size_t>(file.gcount()));
  if (text.size() > kMaxFileBytes) {
    return absl::InvalidArgumentError(path.string() + ": larger than 1 MiB");
  }
  return ParseGenerationDefaults(text, path.string());
}

}  // namespace tandem::gateway
