#pragma once

// Writes a small hub checkpoint as the GGUF file that converters make of it: GGUF's names and keys,
// experts stacked, llama's q and k rows in pairs, llama3's RoPE scaling as a tensor of divisors.
// For tests of the reader; made without it. Weights must be F32 or BF16 in one model.safetensors.

#include <cmath>
#include <cstring>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <numbers>
#include <string>
#include <utility>
#include <vector>

#include "common/base/check.h"
#include "common/checkpoint/safetensors.h"
#include "tests/testing/gguf_builder.h"
#include "tests/testing/safetensors_builder.h"
#include "tests/testing/shared_data.h"

namespace tandem::testing {

class GgufConverter {
 public:
  explicit GgufConverter(const std::filesystem::path& dir)
      : config_(nlohmann::json::parse(ReadWholeFile(dir / "config.json"))) {
    auto file = SafetensorsFile::Open(dir / "model.safetensors");
    TANDEM_CHECK(file.ok());
    file_ = *std::move(file);
  }

  // Leaves one hub tensor out.
  GgufConverter& Without(std::string name) {
    without_ = std::move(name);
    return *this;
  }

  // The builder with all values and tensors, to which a test may add.
  GgufBuilder Convert() {
    const std::string type = config_["model_type"];
    arch_ = type == "mixtral" ? "llama" : type == "qwen3_moe" ? "qwen3moe" : type;
    GgufBuilder out;
    AddValues(out);
    std::map<std::string, std::pair<const SafetensorsEntry*, std::string>> experts;
    for (const SafetensorsEntry& entry : file_->entries()) {
      if (entry.name != without_) AddTensor(entry, experts, out);
    }
    for (const auto& [name, stack] : experts) {
      std::vector<int64_t> shape = stack.first->shape;
      shape.insert(shape.begin(), Experts());
      out.Tensor(name, shape, TypeOf(*stack.first), stack.second);
    }
    AddRopeFactors(out);
    return out;
  }

 private:
  static uint32_t TypeOf(const SafetensorsEntry& entry) {
    TANDEM_CHECK(entry.dtype == DType::kF32 || entry.dtype == DType::kBF16);
    return entry.dtype == DType::kF32 ? 0 : 30;
  }
  int64_t Experts() const {
    return config_.contains("num_experts") ? config_["num_experts"]
                                           : config_.value("num_local_experts", nlohmann::json(0));
  }
  int64_t HeadDim() const {
    const int64_t hidden = config_["hidden_size"];
    const int64_t heads = config_["num_attention_heads"];
    return config_.value("head_dim", hidden / heads);
  }

  void AddValues(GgufBuilder& out) const {
    out.String("general.architecture", arch_);
    const auto u32 = [&](const char* key, const nlohmann::json& value) {
      out.U32(arch_ + "." + key, value.get<uint32_t>());
    };
    u32("context_length", config_["max_position_embeddings"]);
    u32("embedding_length", config_["hidden_size"]);
    u32("block_count", config_["num_hidden_layers"]);
    u32("feed_forward_length", config_["intermediate_size"]);
    u32("attention.head_count", config_["num_attention_heads"]);
    u32("attention.head_count_kv", config_["num_key_value_heads"]);
    u32("attention.key_length", HeadDim());
    u32("attention.value_length", HeadDim());
    u32("rope.dimension_count", HeadDim());
    out.F32(arch_ + ".attention.layer_norm_rms_epsilon", config_["rms_norm_eps"]);
    out.F32(arch_ + ".rope.freq_base", config_["rope_theta"]);
    out.U32("tokenizer.ggml.bos_token_id", config_["bos_token_id"]);
    out.U32("tokenizer.ggml.eos_token_id", config_["eos_token_id"]);
    if (Experts() == 0) return;
    u32("expert_count", Experts());
    u32("expert_used_count", config_["num_experts_per_tok"]);
    if (config_.contains("moe_intermediate_size")) {
      u32("expert_feed_forward_length", config_["moe_intermediate_size"]);
    }
  }

  std::string Bytes(const SafetensorsEntry& entry) const {
    return {file_->View(entry).As<const char>(), entry.end - entry.begin};
  }

  // What the converter of "llama" does to q and k: the two halves of a head's rows alternate.
  std::string PairRows(const SafetensorsEntry& entry) const {
    const std::string rows = Bytes(entry);
    const int64_t row_bytes = static_cast<int64_t>(rows.size()) / entry.shape[0];
    const int64_t dim = HeadDim();
    std::string out;
    for (int64_t head = 0; head < entry.shape[0] / dim; ++head) {
      for (int64_t j = 0; j < dim / 2; ++j) {
        for (int64_t half = 0; half < 2; ++half) {
          const int64_t row = head * dim + half * (dim / 2) + j;
          out += rows.substr(static_cast<size_t>(row * row_bytes), static_cast<size_t>(row_bytes));
        }
      }
    }
    return out;
  }

  static std::string Replace(std::string text, const std::string& from, const std::string& to) {
    const size_t at = text.find(from);
    return at == std::string::npos ? text : text.replace(at, from.size(), to);
  }

  // The GGUF name of a hub name; experts lose their number.
  static std::string Rename(std::string name) {
    for (const auto& [from, to] : std::initializer_list<std::pair<const char*, const char*>>{
             {"model.embed_tokens", "token_embd"},
             {"model.norm", "output_norm"},
             {"lm_head", "output"},
             {"model.layers.", "blk."},
             {"input_layernorm", "attn_norm"},
             {"post_attention_layernorm", "ffn_norm"},
             {"self_attn.q_proj", "attn_q"},
             {"self_attn.k_proj", "attn_k"},
             {"self_attn.v_proj", "attn_v"},
             {"self_attn.o_proj", "attn_output"},
             {"self_attn.q_norm", "attn_q_norm"},
             {"self_attn.k_norm", "attn_k_norm"},
             {"block_sparse_moe", "mlp"},
             {"mlp.gate.", "ffn_gate_inp."},
             {"mlp.gate_proj", "ffn_gate"},
             {"mlp.up_proj", "ffn_up"},
             {"mlp.down_proj", "ffn_down"},
             {"w1", "gate_proj"},
             {"w3", "up_proj"},
             {"w2", "down_proj"}}) {
      name = Replace(std::move(name), from, to);
    }
    const size_t experts = name.find("mlp.experts.");
    if (experts == std::string::npos) return name;
    const size_t part = name.find('.', experts + 12) + 1;
    const size_t end = name.find("_proj", part);
    return name.substr(0, experts) + "ffn_" + name.substr(part, end - part) + "_exps.weight";
  }

  void AddTensor(const SafetensorsEntry& entry,
                 std::map<std::string, std::pair<const SafetensorsEntry*, std::string>>& experts,
                 GgufBuilder& out) const {
    const std::string name = Rename(entry.name);
    if (name.find("_exps.") != std::string::npos) {
      // The file's order is by expert number only below ten, which the fixtures are.
      auto& [first, bytes] = experts[name];
      first = &entry;
      const size_t at = entry.name.find("experts.") + 8;
      const size_t size = entry.end - entry.begin;
      bytes.resize(static_cast<size_t>(Experts()) * size);
      bytes.replace(static_cast<size_t>(std::stoi(entry.name.substr(at))) * size, size,
                    Bytes(entry));
      return;
    }
    const bool paired = arch_ == "llama" && (name.find("attn_q.") != std::string::npos ||
                                             name.find("attn_k.") != std::string::npos);
    out.Tensor(name, entry.shape, TypeOf(entry), paired ? PairRows(entry) : Bytes(entry));
  }

  // factor by wavelength as llama.cpp's converter writes it.
  void AddRopeFactors(GgufBuilder& out) const {
    if (!config_.contains("rope_scaling") || config_["rope_scaling"].is_null()) return;
    const nlohmann::json& scaling = config_["rope_scaling"];
    TANDEM_CHECK(scaling["rope_type"] == "llama3");
    const double factor = scaling["factor"];
    const double low = scaling["low_freq_factor"];
    const double high = scaling["high_freq_factor"];
    const double context = scaling["original_max_position_embeddings"];
    const double theta = config_["rope_theta"];
    std::vector<float> factors;
    for (int64_t i = 0; i < HeadDim() / 2; ++i) {
      const double wavelength =
          2 * std::numbers::pi * std::pow(theta, 2.0 * static_cast<double>(i) / HeadDim());
      if (wavelength < context / high) {
        factors.push_back(1);
      } else if (wavelength > context / low) {
        factors.push_back(static_cast<float>(factor));
      } else {
        const double smooth = (context / wavelength - low) / (high - low);
        factors.push_back(static_cast<float>(1 / ((1 - smooth) / factor + smooth)));
      }
    }
    out.Tensor("rope_freqs.weight", {HeadDim() / 2}, 0, RawBytes(factors));
  }

  nlohmann::json config_;
  std::unique_ptr<SafetensorsFile> file_;
  std::string without_;
  std::string arch_;
};

}  // namespace tandem::testing
