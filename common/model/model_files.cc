#include "common/model/model_files.h"

#include <filesystem>
#include <optional>
#include <utility>

#include "common/base/status.h"
#include "common/model/gguf_config.h"
#include "common/model/hub_config.h"

namespace tandem {

std::string ConfigFile(const std::string& dir, const GgufModel* gguf) {
  return gguf != nullptr ? gguf->path() : (std::filesystem::path(dir) / "config.json").string();
}

absl::StatusOr<nlohmann::json> ReadModelConfig(const std::string& dir, const GgufModel* gguf) {
  if (gguf != nullptr) return GgufHubConfig(*gguf);
  return ReadJsonObject(ConfigFile(dir, nullptr));
}

absl::StatusOr<ModelFiles> OpenModelFiles(const std::string& path) {
  ModelFiles files;
  files.path = path;
  ASSIGN_OR_RETURN(const std::optional<std::string> gguf, FindGguf(path));
  if (gguf) {
    ASSIGN_OR_RETURN(files.gguf, GgufModel::Open(*gguf));
  } else {
    ASSIGN_OR_RETURN(files.generation, LoadGenerationConfig(path));
  }
  files.config_file = ConfigFile(path, files.gguf.get());
  ASSIGN_OR_RETURN(files.config, ReadModelConfig(path, files.gguf.get()));
  return files;
}

absl::StatusOr<ModelSpec> ParseModelSpec(const ModelFiles& files) {
  return ModelSpecFromJson(files.config, {.file = files.config_file});
}

}  // namespace tandem
