#include "common/model/model_tensors.h"

#include <span>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/check.h"
#include "common/base/status.h"
#include "common/checkpoint/quote.h"
#include "common/checkpoint/schemes.h"
#include "common/checkpoint/weight_matrix.h"
#include "common/tensor/convert.h"

namespace tandem {
namespace {

class Collector {
 public:
  explicit Collector(const ModelSpec& spec) : spec_(spec) {}

  std::vector<RequiredTensor> Collect() {
    Add(spec_.embedding, {spec_.vocab, spec_.hidden}, TensorRole::kEmbedding);
    for (const LayerSpec& layer : spec_.layers) {
      Vector(layer.input_norm, spec_.hidden);
      Attention(layer.attention);
      Vector(layer.post_attention_norm, spec_.hidden);
      if (layer.moe) {
        Moe(layer);
      } else {
        Mlp(layer.mlp, layer.dense_intermediate);
      }
    }
    Vector(spec_.final_norm, spec_.hidden);
    if (!spec_.tied_embeddings) {
      Add(spec_.head, {spec_.vocab, spec_.hidden}, TensorRole::kEmbedding);
    }
    return std::move(tensors_);
  }

 private:
  void Add(const std::string& name, std::vector<int64_t> shape, TensorRole role) {
    tensors_.push_back({name, std::move(shape), role});
  }
  void Vector(const std::string& name, int64_t width) {
    if (!name.empty()) Add(name, {width}, TensorRole::kVector);
  }
  void Linear(const LinearNames& names, int64_t out, int64_t in) {
    Add(names.weight, {out, in}, TensorRole::kLinear);
    Vector(names.bias, out);
  }

  void Attention(const AttentionNames& names) {
    const AttentionSpec& a = spec_.attention;
    if (a.kind == AttentionKind::kGqa) {
      Linear(names.q, int64_t{a.heads} * a.head_dim, spec_.hidden);
      Linear(names.k, int64_t{a.kv_heads} * a.head_dim, spec_.hidden);
      Linear(names.v, int64_t{a.kv_heads} * a.head_dim, spec_.hidden);
      Vector(names.q_norm, a.head_dim);
      Vector(names.k_norm, a.head_dim);
      Linear(names.o, spec_.hidden, int64_t{a.heads} * a.head_dim);
      return;
    }
    const int64_t q_width = int64_t{a.heads} * (a.nope_dim + a.rope_dim);
    if (a.q_lora_rank == 0) {
      Linear(names.q, q_width, spec_.hidden);
    } else {
      Linear(names.q_a, a.q_lora_rank, spec_.hidden);
      Vector(names.q_a_norm, a.q_lora_rank);
      Linear(names.q_b, q_width, a.q_lora_rank);
    }
    Linear(names.kv_a, a.kv_lora_rank + a.rope_dim, spec_.hidden);
    Vector(names.kv_a_norm, a.kv_lora_rank);
    Linear(names.kv_b, int64_t{a.heads} * (a.nope_dim + a.v_dim), a.kv_lora_rank);
    Linear(names.o, spec_.hidden, int64_t{a.heads} * a.v_dim);
  }

  void Mlp(const MlpNames& names, int64_t width) {
    Linear(names.gate, width, spec_.hidden);
    Linear(names.up, width, spec_.hidden);
    Linear(names.down, spec_.hidden, width);
  }

  void Moe(const LayerSpec& layer) {
    const MoeSpec& moe = spec_.moe;
    Linear({layer.router_weight, ""}, moe.experts, spec_.hidden);
    Vector(layer.router_bias, moe.experts);
    if (moe.shared_intermediate > 0) Mlp(layer.mlp, moe.shared_intermediate);
    for (int e = 0; e < moe.experts; ++e) {
      Add(ExpertTensorName(layer.expert_gate, e), {moe.intermediate, spec_.hidden},
          TensorRole::kRouted);
      Add(ExpertTensorName(layer.expert_up, e), {moe.intermediate, spec_.hidden},
          TensorRole::kRouted);
      Add(ExpertTensorName(layer.expert_down, e), {spec_.hidden, moe.intermediate},
          TensorRole::kRouted);
    }
  }

  const ModelSpec& spec_;
  std::vector<RequiredTensor> tensors_;
};

// GGUF files quantize embeddings too.
bool IsMatrixRole(TensorRole role) { return role != TensorRole::kVector; }

absl::Status CheckOne(const Checkpoint& checkpoint, const RequiredTensor& need,
                      const QuantScheme& scheme) {
  if (IsMatrixRole(need.role)) {
    return WeightMatrix::Create(checkpoint, need.name, need.shape[0], need.shape[1], scheme)
        .status();
  }
  ASSIGN_OR_RETURN(const Checkpoint::Tensor* tensor, checkpoint.Get(need.name, need.shape));
  const DType dtype = tensor->view.dtype;
  if (dtype == DType::kF32 || dtype == DType::kF16 || dtype == DType::kBF16) {
    return absl::OkStatus();
  }
  return TensorError(*tensor, absl::StrCat("dtype ", std::string(DTypeName(dtype)),
                                           " is not supported here, expected F32, F16 or BF16"));
}

// FNV-1a, 64 bits: a fingerprint against accidents, not against an adversary.
class Hasher {
 public:
  void Bytes(const void* data, size_t size) {
    const auto* bytes = static_cast<const unsigned char*>(data);
    for (size_t i = 0; i < size; ++i) hash_ = (hash_ ^ bytes[i]) * 0x100000001b3u;
  }
  void Text(std::string_view text) {
    Number(text.size());
    Bytes(text.data(), text.size());
  }
  void Number(uint64_t value) { Bytes(&value, sizeof(value)); }
  void Real(float value) { Bytes(&value, sizeof(value)); }
  uint64_t value() const { return hash_; }

 private:
  uint64_t hash_ = 0xcbf29ce484222325u;
};

void HashSpec(const ModelSpec& spec, Hasher& hasher) {
  hasher.Text(spec.model_type);
  const AttentionSpec& a = spec.attention;
  const RouterSpec& r = spec.moe.router;
  for (int64_t value : {int64_t{spec.hidden},
                        int64_t{spec.vocab},
                        int64_t{spec.max_context},
                        int64_t{spec.tied_embeddings},
                        static_cast<int64_t>(a.kind),
                        int64_t{a.heads},
                        int64_t{a.kv_heads},
                        int64_t{a.head_dim},
                        int64_t{a.q_lora_rank},
                        int64_t{a.kv_lora_rank},
                        int64_t{a.nope_dim},
                        int64_t{a.rope_dim},
                        int64_t{a.v_dim},
                        int64_t{a.window_tokens},
                        int64_t{a.qk_norm},
                        static_cast<int64_t>(spec.rope.layout),
                        int64_t{spec.rope.rotary_dims},
                        int64_t{spec.moe.experts},
                        int64_t{spec.moe.top_k},
                        int64_t{spec.moe.intermediate},
                        int64_t{spec.moe.shared_intermediate},
                        static_cast<int64_t>(r.score),
                        int64_t{r.selection_bias},
                        int64_t{r.groups},
                        int64_t{r.groups_kept},
                        int64_t{r.group_score_max},
                        int64_t{r.renormalize},
                        static_cast<int64_t>(spec.quant.method),
                        spec.quant.block.rows,
                        spec.quant.block.cols,
                        int64_t{spec.quant.zero_minus_one}}) {
    hasher.Number(static_cast<uint64_t>(value));
  }
  for (float value : {spec.norm_eps, a.softmax_scale, a.latent_eps, spec.rope.attention_factor,
                      r.renormalize_eps, r.factor}) {
    hasher.Real(value);
  }
  for (const QuantizedWeights& weights : spec.quant.weights) {
    hasher.Number(static_cast<uint64_t>(weights.bits));
    hasher.Number(static_cast<uint64_t>(weights.group_columns));
    hasher.Number(weights.symmetric ? 1 : 0);
  }
  for (float value : spec.rope.inv_freq) hasher.Real(value);
  for (const LayerSpec& layer : spec.layers) {
    hasher.Number(layer.moe ? 1 : 0);
    hasher.Number(static_cast<uint64_t>(layer.dense_intermediate));
  }
}

}  // namespace

std::vector<RequiredTensor> RequiredTensors(const ModelSpec& spec) {
  return Collector(spec).Collect();
}

absl::Status CheckTensors(const Checkpoint& checkpoint, const ModelSpec& spec) {
  const std::vector<RequiredTensor> required = RequiredTensors(spec);
  const RequiredTensor* first_missing = nullptr;
  size_t missing = 0;
  for (const RequiredTensor& need : required) {
    if (FindWeight(checkpoint, need.name) != nullptr) continue;
    if (missing++ == 0) first_missing = &need;
  }
  if (missing > 0) {
    return absl::NotFoundError(absl::StrCat(
        checkpoint.dir(), ": incomplete checkpoint: tensor ", QuoteForMessage(first_missing->name),
        " is missing (", missing, " of ", required.size(), " required tensors are)"));
  }
  for (const RequiredTensor& need : required) {
    RETURN_IF_ERROR(CheckOne(checkpoint, need, spec.quant));
  }
  return absl::OkStatus();
}

uint64_t StoredBytes(const Checkpoint& checkpoint, const ModelSpec& spec, TensorRole role) {
  uint64_t bytes = 0;
  for (const RequiredTensor& need : RequiredTensors(spec)) {
    if (need.role != role) continue;
    if (IsMatrixRole(role)) {
      auto matrix =
          WeightMatrix::Create(checkpoint, need.name, need.shape[0], need.shape[1], spec.quant);
      TANDEM_CHECK(matrix.ok());
      bytes += matrix->stored_bytes();
    } else {
      const Checkpoint::Tensor* tensor = checkpoint.Find(need.name);
      TANDEM_CHECK(tensor != nullptr);
      bytes += static_cast<uint64_t>(tensor->view.Elements()) * DTypeBytes(tensor->view.dtype);
    }
  }
  return bytes;
}

namespace {

// The name without its directory: a moved or differently mounted model is the same model.
void HashFile(const std::string& path, uint64_t bytes, int64_t mtime_ns, Hasher& hasher) {
  hasher.Text(std::string_view(path).substr(path.rfind('/') + 1));
  hasher.Number(bytes);
  hasher.Number(static_cast<uint64_t>(mtime_ns));
}

void HashTensor(std::string_view name, uint64_t type, std::span<const int64_t> shape,
                uint64_t offset, Hasher& hasher) {
  hasher.Text(name);
  hasher.Number(type);
  hasher.Number(shape.size());
  for (int64_t dim : shape) hasher.Number(static_cast<uint64_t>(dim));
  hasher.Number(offset);
}

void HashGguf(const GgufModel& model, Hasher& hasher) {
  for (const GgufModel::File& file : model.files()) {
    HashFile(file.mapped->path(), file.mapped->bytes(), file.mapped->mtime_ns(), hasher);
    for (const GgufTensor& tensor : file.contents.tensors) {
      HashTensor(tensor.name, static_cast<uint64_t>(tensor.type->type),
                 {tensor.shape.data(), static_cast<size_t>(tensor.rank)}, tensor.offset, hasher);
    }
  }
}

}  // namespace

uint64_t ModelHash(const Checkpoint& checkpoint, const ModelSpec& spec) {
  Hasher hasher;
  HashSpec(spec, hasher);
  for (const auto& file : checkpoint.files()) {
    HashFile(file->path(), file->file_bytes(), file->mtime_ns(), hasher);
    for (const SafetensorsEntry& entry : file->entries()) {
      HashTensor(entry.name, static_cast<uint64_t>(entry.dtype), entry.shape, entry.begin, hasher);
    }
  }
  if (checkpoint.gguf() != nullptr) HashGguf(*checkpoint.gguf(), hasher);
  return hasher.value();
}

std::string ExpertTensorName(const std::string& pattern, int expert) {
  const size_t at = pattern.find("%d");
  TANDEM_CHECK(at != std::string::npos);
  return absl::StrCat(pattern.substr(0, at), expert, pattern.substr(at + 2));
}

}  // namespace tandem
