#include "gateway/model_directory.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/log.h"
#include "common/base/status.h"
#include "common/model/model_files.h"
#include "common/model/model_loader.h"
#include "gateway/gguf_tokenizer.h"

namespace tandem::gateway {
namespace {

GenerationDefaults DefaultsOf(const GenerationConfig& config) {
  GenerationDefaults defaults;
  defaults.temperature = config.temperature.value_or(1);
  defaults.top_k = config.top_k.value_or(0);
  defaults.top_p = config.top_p.value_or(1);
  defaults.min_p = config.min_p.value_or(0);
  defaults.repetition_penalty = config.repetition_penalty.value_or(1);
  return defaults;
}

// Absent and unsupported tokenizers leave the model usable by token ids; a broken file does not.
bool MeansNoText(const absl::Status& status) {
  return absl::IsNotFound(status) || absl::IsUnimplemented(status);
}

absl::StatusOr<std::unique_ptr<Tokenizer>> LoadTokenizer(const ModelFiles& files) {
  if (files.gguf == nullptr) return Tokenizer::Load(files.path);
  ASSIGN_OR_RETURN(GgufTokenizer read, ReadGgufTokenizer(*files.gguf));
  return Tokenizer::FromSpec(std::move(read.spec), files.gguf->path(), std::move(read.config));
}

absl::Status LoadText(const ModelFiles& files, ModelDirectory* model) {
  absl::StatusOr<std::unique_ptr<Tokenizer>> tokenizer = LoadTokenizer(files);
  if (!tokenizer.ok()) {
    if (!MeansNoText(tokenizer.status())) return tokenizer.status();
    LogWarn("tokenizer_absent", {{"reason", std::string(tokenizer.status().message())},
                                 {"consequence", "token ids in and out only"}});
    return absl::OkStatus();
  }
  model->tokenizer = *std::move(tokenizer);
  absl::StatusOr<std::unique_ptr<ChatTemplate>> chat_template =
      ChatTemplate::Create(model->tokenizer->config(), model->tokenizer->added_tokens(), {});
  if (chat_template.ok()) {
    model->chat_template = *std::move(chat_template);
  } else if (MeansNoText(chat_template.status())) {
    LogWarn("chat_template_absent", {{"reason", std::string(chat_template.status().message())}});
  } else {
    return Annotate(chat_template.status(), files.path);
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ModelDirectory> LoadModelDirectory(const std::string& path) {
  ModelDirectory model;
  ASSIGN_OR_RETURN(const ModelFiles files, OpenModelFiles(path));
  ASSIGN_OR_RETURN(const ModelSpec spec, ParseModelSpec(files));
  const GenerationConfig& generation = files.generation;
  model.defaults = DefaultsOf(generation);
  RETURN_IF_ERROR(LoadText(files, &model));
  // A tokenizer with ids beyond the embeddings belongs to another model.
  if (model.tokenizer && model.tokenizer->vocab_size() > static_cast<uint32_t>(spec.vocab)) {
    return absl::InvalidArgumentError(
        absl::StrCat(files.gguf ? path + ": its tokenizer" : path + "/tokenizer.json",
                     " has token ids up to ", model.tokenizer->vocab_size() - 1, ", but ",
                     files.config_file, " a vocabulary of ", spec.vocab));
  }

  model.end_ids = spec.end_ids;
  model.end_ids.insert(model.end_ids.end(), generation.end_ids.begin(), generation.end_ids.end());
  if (model.tokenizer && model.tokenizer->eos_id()) {
    model.end_ids.push_back(*model.tokenizer->eos_id());
  }
  std::sort(model.end_ids.begin(), model.end_ids.end());
  model.end_ids.erase(std::unique(model.end_ids.begin(), model.end_ids.end()), model.end_ids.end());
  return model;
}

}  // namespace tandem::gateway
