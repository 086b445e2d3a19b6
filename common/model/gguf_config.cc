#include "common/model/gguf_config.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/status.h"
#include "common/checkpoint/gguf_names.h"
#include "common/checkpoint/quote.h"
#include "common/tensor/convert.h"

namespace tandem {
namespace {

// Keys below "ARCH." that change what is computed and that no supported architecture has.
constexpr std::string_view kRefusedKeys[] = {
    "attention.clamp_kqv",     "attention.max_alibi_bias",
    "attention.scale",         "attention.sliding_window",
    "attn_logit_softcapping",  "embedding_scale",
    "final_logit_softcapping", "logit_scale",
    "residual_scale",          "rope.scale_linear",
    "use_parallel_residual",
};

constexpr int64_t kMaxLayers = 1024;  // as the families have it

// Tokens that end an answer whatever eos_token_id says; chat models often have two of them.
constexpr std::string_view kEndTokens[] = {
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|end_of_text|>", "<|endoftext|>", "<|eom_id|>",
};

class Translator {
 public:
  Translator(const GgufModel& model, const GgufArchitecture& architecture)
      : model_(model), architecture_(architecture), prefix_(std::string(architecture.name) + ".") {}

  absl::StatusOr<nlohmann::json> Run() {
    config_["model_type"] = std::string(architecture_.model_type);
    RETURN_IF_ERROR(Refuse());
    RETURN_IF_ERROR(Sizes());
    RETURN_IF_ERROR(Attention());
    RETURN_IF_ERROR(Rope());
    if (architecture_.has_experts) RETURN_IF_ERROR(Experts());
    RETURN_IF_ERROR(Tokens());
    return std::move(config_);
  }

 private:
  std::string Key(std::string_view name) const { return prefix_ + std::string(name); }

  absl::StatusOr<int64_t> Required(std::string_view name) const {
    ASSIGN_OR_RETURN(const std::optional<int64_t> value, model_.Int(Key(name)));
    if (!value) return model_.KeyError(Key(name), "is missing");
    return *value;
  }
  absl::Status Copy(std::string_view name, const char* hub) {
    ASSIGN_OR_RETURN(config_[hub], Required(name));
    return absl::OkStatus();
  }
  absl::Status CopyOptional(std::string_view name, const char* hub) {
    ASSIGN_OR_RETURN(const std::optional<int64_t> value, model_.Int(Key(name)));
    if (value) config_[hub] = *value;
    return absl::OkStatus();
  }
  absl::Status CopyReal(std::string_view name, const char* hub) {
    ASSIGN_OR_RETURN(const std::optional<double> value, model_.Real(Key(name)));
    if (value) config_[hub] = *value;
    return absl::OkStatus();
  }
  bool HasTensor(std::string_view name) const { return model_.FindTensor(name) != nullptr; }

  absl::Status Refuse() const;
  absl::Status Sizes();
  absl::Status Attention();
  absl::Status Rope();
  absl::Status Experts();
  absl::Status Tokens();

  const GgufModel& model_;
  const GgufArchitecture& architecture_;
  const std::string prefix_;
  nlohmann::json config_ = nlohmann::json::object();
};

absl::Status Translator::Refuse() const {
  for (std::string_view name : kRefusedKeys) {
    const GgufValue* value = model_.Find(Key(name));
    if (value == nullptr) continue;
    const bool nothing = value->unsigned_value == 0 && value->signed_value == 0 &&
                         value->real == 0 && !value->boolean;
    if (!nothing || value->kind == GgufKind::kString || value->kind == GgufKind::kArray) {
      return model_.KeyError(Key(name), "is set, which is not supported");
    }
  }
  return absl::OkStatus();
}

absl::Status Translator::Sizes() {
  const GgufTensor* embedding = model_.FindTensor("token_embd.weight");
  if (embedding == nullptr || embedding->rank != 2) {
    return absl::InvalidArgumentError(absl::StrCat(
        model_.path(), ": tensor 'token_embd.weight' is missing or has not two dimensions"));
  }
  config_["vocab_size"] = embedding->shape[0];
  RETURN_IF_ERROR(Copy("context_length", "max_position_embeddings"));
  RETURN_IF_ERROR(Copy("embedding_length", "hidden_size"));
  RETURN_IF_ERROR(Copy("block_count", "num_hidden_layers"));
  RETURN_IF_ERROR(CopyOptional("feed_forward_length", "intermediate_size"));
  RETURN_IF_ERROR(CopyReal("attention.layer_norm_rms_epsilon", "rms_norm_eps"));
  if (!config_.contains("rms_norm_eps")) {
    return model_.KeyError(Key("attention.layer_norm_rms_epsilon"), "is missing");
  }
  config_["mlp_bias"] = HasTensor("blk.0.ffn_up.bias");
  config_["attention_bias"] = HasTensor("blk.0.attn_q.bias");
  return absl::OkStatus();
}

absl::Status Translator::Attention() {
  RETURN_IF_ERROR(Copy("attention.head_count", "num_attention_heads"));
  RETURN_IF_ERROR(CopyOptional("attention.head_count_kv", "num_key_value_heads"));
  ASSIGN_OR_RETURN(const int64_t head_dim, GgufHeadDim(model_, architecture_.name));
  config_["head_dim"] = head_dim;
  for (const char* name : {"attention.value_length", "rope.dimension_count"}) {
    ASSIGN_OR_RETURN(const std::optional<int64_t> value, model_.Int(Key(name)));
    if (!value || *value == head_dim) continue;
    return model_.KeyError(Key(name), absl::StrCat("is ", *value, ", heads have ", head_dim,
                                                   " dimensions: not supported"));
  }
  return absl::OkStatus();
}

absl::Status Translator::Rope() {
  RETURN_IF_ERROR(CopyReal("rope.freq_base", "rope_theta"));
  ASSIGN_OR_RETURN(const auto type, model_.String(Key("rope.scaling.type")));
  if (!type || *type == "none") return absl::OkStatus();
  nlohmann::json scaling = {{"rope_type", std::string(*type)}};
  ASSIGN_OR_RETURN(const std::optional<double> factor, model_.Real(Key("rope.scaling.factor")));
  ASSIGN_OR_RETURN(const std::optional<int64_t> original,
                   model_.Int(Key("rope.scaling.original_context_length")));
  if (factor) scaling["factor"] = *factor;
  if (original) scaling["original_max_position_embeddings"] = *original;
  for (const auto& [name, hub] : {std::pair("rope.scaling.yarn_beta_fast", "beta_fast"),
                                  std::pair("rope.scaling.yarn_beta_slow", "beta_slow")}) {
    ASSIGN_OR_RETURN(const std::optional<double> value, model_.Real(Key(name)));
    if (value) scaling[hub] = *value;
  }
  // A factor on top of YaRN's own 0.1 ln f + 1.
  ASSIGN_OR_RETURN(const std::optional<double> attention,
                   model_.Real(Key("rope.scaling.attn_factor")));
  if (attention && *attention != 1 && factor && *factor > 0) {
    scaling["attention_factor"] = *attention * (*factor > 1 ? 0.1 * std::log(*factor) + 1 : 1);
  }
  config_["rope_scaling"] = std::move(scaling);
  return absl::OkStatus();
}

absl::Status Translator::Experts() {
  const bool mixtral = architecture_.model_type == "mixtral";
  RETURN_IF_ERROR(Copy("expert_count", mixtral ? "num_local_experts" : "num_experts"));
  RETURN_IF_ERROR(Copy("expert_used_count", "num_experts_per_tok"));
  if (!mixtral) {
    RETURN_IF_ERROR(Copy("expert_feed_forward_length", "moe_intermediate_size"));
    // Layers without a router are dense.
    const int64_t layers = std::min(config_["num_hidden_layers"].get<int64_t>(), kMaxLayers);
    nlohmann::json dense = nlohmann::json::array();
    for (int64_t n = 0; n < layers; ++n) {
      if (!HasTensor(absl::StrCat("blk.", n, ".ffn_gate_inp.weight"))) dense.push_back(n);
    }
    config_["mlp_only_layers"] = std::move(dense);
  }
  // Both families renormalize and neither scales; a file that says otherwise is another model.
  ASSIGN_OR_RETURN(const std::optional<bool> norm, model_.Bool(Key("expert_weights_norm")));
  ASSIGN_OR_RETURN(const std::optional<double> scale, model_.Real(Key("expert_weights_scale")));
  ASSIGN_OR_RETURN(const std::optional<int64_t> gating, model_.Int(Key("expert_gating_func")));
  constexpr int64_t kSoftmax = 1;
  config_["norm_topk_prob"] = norm.value_or(true);
  if (mixtral && !norm.value_or(true)) {
    return model_.KeyError(Key("expert_weights_norm"), "is false, which is not supported");
  }
  if (scale && *scale != 1) {
    return model_.KeyError(Key("expert_weights_scale"),
                           absl::StrCat("is ", *scale, ", which is not supported"));
  }
  if (gating && *gating != kSoftmax) {
    return model_.KeyError(Key("expert_gating_func"),
                           absl::StrCat("is ", *gating, ", only 1 (softmax) is supported"));
  }
  return absl::OkStatus();
}

absl::Status Translator::Tokens() {
  ASSIGN_OR_RETURN(const std::optional<int64_t> bos, model_.Int("tokenizer.ggml.bos_token_id"));
  if (bos) config_["bos_token_id"] = *bos;
  std::vector<int64_t> ends;
  for (const char* key : {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id",
                          "tokenizer.ggml.eom_token_id"}) {
    ASSIGN_OR_RETURN(const std::optional<int64_t> id, model_.Int(key));
    if (id) ends.push_back(*id);
  }
  ASSIGN_OR_RETURN(const auto* tokens, model_.Strings("tokenizer.ggml.tokens"));
  for (size_t id = 0; tokens != nullptr && id < tokens->size(); ++id) {
    const bool is_end = std::find(std::begin(kEndTokens), std::end(kEndTokens), (*tokens)[id]) !=
                        std::end(kEndTokens);
    if (is_end) ends.push_back(static_cast<int64_t>(id));
  }
  std::sort(ends.begin(), ends.end());
  ends.erase(std::unique(ends.begin(), ends.end()), ends.end());
  if (!ends.empty()) config_["eos_token_id"] = ends;
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<nlohmann::json> GgufHubConfig(const GgufModel& model) {
  ASSIGN_OR_RETURN(const GgufArchitecture* architecture, ArchitectureOf(model));
  return Translator(model, *architecture).Run();
}

absl::Status ApplyGgufRopeFactors(const GgufModel& model, ModelSpec& spec) {
  const GgufTensor* tensor = model.FindTensor(kGgufRopeFactors);
  if (tensor == nullptr) return absl::OkStatus();
  std::vector<float>& inv_freq = spec.rope.inv_freq;
  const auto error = [&](std::string_view what) {
    return absl::InvalidArgumentError(absl::StrCat(std::string(tensor->file), ": tensor ",
                                                   QuoteForMessage(tensor->name), ": ",
                                                   std::string(what)));
  };
  if (tensor->rank != 1 || tensor->type->type != GgufType::kF32 ||
      tensor->row_elements() != static_cast<int64_t>(inv_freq.size())) {
    return error(absl::StrCat("is not F32 [", inv_freq.size(), "]"));
  }
  std::vector<float> factors(inv_freq.size());
  ConvertToF32(DType::kF32, tensor->data, tensor->row_elements(), factors.data());
  for (size_t i = 0; i < factors.size(); ++i) {
    if (!std::isfinite(factors[i]) || factors[i] <= 0) {
      return error(absl::StrCat("element ", i, " is not a positive number"));
    }
    inv_freq[i] /= factors[i];
  }
  return absl::OkStatus();
}

}  // namespace tandem
