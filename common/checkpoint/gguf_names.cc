#include "common/checkpoint/gguf_names.h"

#include <charconv>
#include <optional>
#include <span>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/status.h"
#include "common/checkpoint/quote.h"

namespace tandem {
namespace {

constexpr GgufArchitecture kArchitectures[] = {
    {"llama", "llama", "mlp", "", "", "", false, true},
    {"llama", "mixtral", "block_sparse_moe", "w1", "w3", "w2", true, true},
    {"qwen2", "qwen2", "mlp", "", "", "", false, false},
    {"qwen3", "qwen3", "mlp", "", "", "", false, false},
    {"qwen3moe", "qwen3_moe", "mlp", "gate_proj", "up_proj", "down_proj", true, false},
};

using Pair = std::pair<std::string_view, std::string_view>;

constexpr Pair kTopNames[] = {
    {"token_embd.weight", "model.embed_tokens.weight"},
    {"output_norm.weight", "model.norm.weight"},
    {"output.weight", "lm_head.weight"},
    {kGgufRopeFactors, kGgufRopeFactors},
};

// Modules of a layer, before ".weight" or ".bias".
constexpr Pair kLayerModules[] = {
    {"attn_norm", "input_layernorm"},    {"ffn_norm", "post_attention_layernorm"},
    {"attn_q", "self_attn.q_proj"},      {"attn_k", "self_attn.k_proj"},
    {"attn_v", "self_attn.v_proj"},      {"attn_output", "self_attn.o_proj"},
    {"attn_q_norm", "self_attn.q_norm"}, {"attn_k_norm", "self_attn.k_norm"},
    {"ffn_gate", "mlp.gate_proj"},       {"ffn_up", "mlp.up_proj"},
    {"ffn_down", "mlp.down_proj"},
};

std::optional<std::string_view> Translate(std::span<const Pair> names, std::string_view name) {
  for (const auto& [gguf, hub] : names) {
    if (gguf == name) return hub;
  }
  return std::nullopt;
}

class Translator {
 public:
  Translator(const GgufModel& model, const GgufArchitecture& architecture, int64_t head_dim)
      : model_(model), architecture_(architecture), head_dim_(head_dim) {}

  absl::StatusOr<std::vector<HubTensor>> Run() {
    for (const GgufTensor* tensor : model_.tensors()) RETURN_IF_ERROR(Add(*tensor));
    return std::move(out_);
  }

 private:
  absl::Status Error(const GgufTensor& tensor, std::string_view what) const {
    return absl::InvalidArgumentError(absl::StrCat(std::string(tensor.file), ": tensor ",
                                                   QuoteForMessage(tensor.name), ": ",
                                                   std::string(what)));
  }
  absl::Status Unknown(const GgufTensor& tensor) const {
    return Error(tensor, absl::StrCat("is not known to architecture '",
                                      std::string(architecture_.name), "'"));
  }

  absl::Status Add(const GgufTensor& tensor) {
    constexpr std::string_view kLayer = "blk.";
    if (const auto top = Translate(kTopNames, tensor.name)) {
      return AddWhole(tensor, std::string(*top), 0);
    }
    if (!tensor.name.starts_with(kLayer)) return Unknown(tensor);
    const std::string_view rest = tensor.name.substr(kLayer.size());
    uint32_t layer = 0;
    const auto [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), layer);
    if (error != std::errc() || end == rest.data() + rest.size() || *end != '.') {
      return Unknown(tensor);
    }
    const std::string_view inner = rest.substr(static_cast<size_t>(end - rest.data()) + 1);
    return AddLayerTensor(tensor, absl::StrCat("model.layers.", layer, "."), inner);
  }

  absl::Status AddLayerTensor(const GgufTensor& tensor, const std::string& prefix,
                              std::string_view inner) {
    const size_t dot = inner.rfind('.');
    const std::string_view kind = dot == std::string_view::npos ? "" : inner.substr(dot);
    const std::string_view module = inner.substr(0, dot);
    if (kind != ".weight" && kind != ".bias") return Unknown(tensor);
    if (const auto hub = Translate(kLayerModules, module)) {
      const bool paired = architecture_.paired_rows && (module == "attn_q" || module == "attn_k");
      return AddWhole(tensor, absl::StrCat(prefix, std::string(*hub), std::string(kind)),
                      paired ? head_dim_ : 0);
    }
    const std::string block = prefix + std::string(architecture_.moe_block);
    if (kind == ".weight" && module == "ffn_gate_inp") {
      return AddWhole(tensor, block + ".gate.weight", 0);
    }
    if (!architecture_.has_experts) return Unknown(tensor);
    for (const auto& [gguf, part] :
         {Pair{"ffn_gate_exps", architecture_.gate}, Pair{"ffn_up_exps", architecture_.up},
          Pair{"ffn_down_exps", architecture_.down}}) {
      if (kind == ".weight" && module == gguf) return AddExperts(tensor, block, part);
    }
    return Unknown(tensor);
  }

  absl::Status AddWhole(const GgufTensor& tensor, std::string name, int64_t paired_rows) {
    if (tensor.rank > 2) return Error(tensor, "has more than two dimensions");
    const int64_t rows = tensor.rank == 2 ? tensor.shape[0] : 1;
    // A bias's elements are rows of its matrix.
    const int64_t outputs = tensor.rank == 2 ? rows : tensor.row_elements();
    if (paired_rows != 0 && (paired_rows % 2 != 0 || outputs % paired_rows != 0)) {
      return Error(tensor, absl::StrCat(outputs, " rows are not whole heads of ", paired_rows));
    }
    out_.push_back({std::move(name), &tensor, 0, tensor.rank, rows, paired_rows});
    return absl::OkStatus();
  }

  absl::Status AddExperts(const GgufTensor& tensor, const std::string& block,
                          std::string_view part) {
    constexpr int64_t kMaxExperts = 0xFFFF;
    if (tensor.rank != 3 || tensor.shape[0] > kMaxExperts) {
      return Error(tensor, "is not [experts, rows, columns]");
    }
    for (int64_t expert = 0; expert < tensor.shape[0]; ++expert) {
      out_.push_back({absl::StrCat(block, ".experts.", expert, ".", std::string(part), ".weight"),
                      &tensor, expert * tensor.shape[1], 2, tensor.shape[1], 0});
    }
    return absl::OkStatus();
  }

  const GgufModel& model_;
  const GgufArchitecture& architecture_;
  const int64_t head_dim_;
  std::vector<HubTensor> out_;
};

}  // namespace

absl::StatusOr<const GgufArchitecture*> ArchitectureOf(const GgufModel& model) {
  constexpr const char* kKey = "general.architecture";
  ASSIGN_OR_RETURN(const std::optional<std::string_view> name, model.String(kKey));
  if (!name) return model.KeyError(kKey, "is missing");
  ASSIGN_OR_RETURN(const std::optional<int64_t> experts,
                   model.Int(absl::StrCat(std::string(*name), ".expert_count")));
  std::string known;
  std::string_view listed;
  for (const GgufArchitecture& architecture : kArchitectures) {
    if (architecture.name == *name && architecture.has_experts == (experts.value_or(0) > 0)) {
      return &architecture;
    }
    if (architecture.name == listed) continue;
    listed = architecture.name;
    absl::StrAppend(&known, known.empty() ? "" : ", ", std::string(listed));
  }
  return absl::UnimplementedError(
      absl::StrCat(model.path(), ": key '", kKey, "': ", QuoteForMessage(*name), " with ",
                   experts.value_or(0), " experts is not supported; supported are ", known));
}

absl::StatusOr<int64_t> GgufHeadDim(const GgufModel& model, std::string_view architecture) {
  const std::string prefix(architecture);
  ASSIGN_OR_RETURN(const auto key_length, model.Int(prefix + ".attention.key_length"));
  if (key_length) {
    if (*key_length > 0) return *key_length;
    return model.KeyError(prefix + ".attention.key_length", "is not positive");
  }
  const std::string heads_key = prefix + ".attention.head_count";
  ASSIGN_OR_RETURN(const auto heads, model.Int(heads_key));
  ASSIGN_OR_RETURN(const auto width, model.Int(prefix + ".embedding_length"));
  if (!heads || *heads <= 0) return model.KeyError(heads_key, "is missing or not positive");
  if (!width || *width <= 0 || *width % *heads != 0) {
    return model.KeyError(prefix + ".embedding_length",
                          absl::StrCat("is missing or not a multiple of ", *heads, " heads"));
  }
  return *width / *heads;
}

absl::StatusOr<std::vector<HubTensor>> TranslateTensors(const GgufModel& model) {
  ASSIGN_OR_RETURN(const GgufArchitecture* architecture, ArchitectureOf(model));
  ASSIGN_OR_RETURN(const int64_t head_dim, GgufHeadDim(model, architecture->name));
  return Translator(model, *architecture, head_dim).Run();
}

}  // namespace tandem
