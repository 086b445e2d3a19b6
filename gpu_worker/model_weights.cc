#include "gpu_worker/model_weights.h"

#include <span>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/status.h"
#include "common/checkpoint/weight_matrix.h"
#include "common/model/model_tensors.h"

namespace tandem::gpu {
namespace {

absl::Status ReadRectangle(const WeightMatrix& matrix, DType dtype, Range rows, Range cols,
                           void* out) {
  const size_t elements = static_cast<size_t>(rows.size() * cols.size());
  if (dtype == DType::kBF16) {
    return matrix.ReadBf16(rows, cols, std::span(static_cast<uint16_t*>(out), elements));
  }
  return matrix.ReadF32(rows, cols, std::span(static_cast<float*>(out), elements));
}

// Rows [begin, end) of the transpose of `block` (rows of `matrix`).
template <typename T>
absl::Status ReadTransposed(const WeightMatrix& matrix, Range block, int64_t begin, int64_t end,
                            T* out) {
  const Range cols{begin, end};
  std::vector<T> part(static_cast<size_t>(block.size() * cols.size()));
  constexpr DType kDtype = sizeof(T) == 2 ? DType::kBF16 : DType::kF32;
  RETURN_IF_ERROR(ReadRectangle(matrix, kDtype, block, cols, part.data()));
  for (int64_t r = 0; r < block.size(); ++r) {
    for (int64_t c = 0; c < cols.size(); ++c) {
      out[c * block.size() + r] = part[static_cast<size_t>(r * cols.size() + c)];
    }
  }
  return absl::OkStatus();
}

class Loader {
 public:
  Loader(const Checkpoint& checkpoint, const ModelSpec& spec, Backend& backend,
         const std::function<absl::Status(uint64_t)>& progress)
      : checkpoint_(checkpoint), spec_(spec), backend_(backend), progress_(progress) {}

  absl::StatusOr<ModelWeights> Load();

 private:
  absl::StatusOr<LayerWeights> Layer(const LayerSpec& names);
  absl::Status Gqa(const AttentionNames& names, AttentionWeights& out);
  absl::Status Mla(const AttentionNames& names, AttentionWeights& out);
  absl::Status KvB(const AttentionNames& names, AttentionWeights& out);
  absl::Status Mlp(const MlpNames& names, int64_t intermediate, MlpWeights& out);

  absl::StatusOr<WeightMatrix> Open(const std::string& name, int64_t rows, int64_t cols) const {
    return WeightMatrix::Create(checkpoint_, name, rows, cols, spec_.quant);
  }
  absl::Status Linear(const LinearNames& names, int64_t n, int64_t k, LinearLayer& out);
  absl::Status Vector(const std::string& name, int64_t size, const float*& out);
  absl::Status Embedding(TensorView& out);
  absl::Status Head(LinearLayer& out);
  absl::StatusOr<const float*> Upload(std::span<const float> values);
  absl::Status Count(uint64_t bytes) {
    if (counting_) loaded_ += bytes;
    return progress_ ? progress_(loaded_) : absl::OkStatus();
  }

  const Checkpoint& checkpoint_;
  const ModelSpec& spec_;
  Backend& backend_;
  const std::function<absl::Status(uint64_t)>& progress_;
  uint64_t loaded_ = 0;
  bool counting_ = true;
};

absl::StatusOr<const float*> Loader::Upload(std::span<const float> values) {
  ASSIGN_OR_RETURN(void* memory, backend_.Allocate(values.size_bytes()));
  backend_.CopyToDevice(memory, values.data(), values.size_bytes());
  RETURN_IF_ERROR(backend_.Synchronize());
  return static_cast<const float*>(memory);
}

absl::Status Loader::Vector(const std::string& name, int64_t size, const float*& out) {
  const int64_t shape[] = {size};
  RETURN_IF_ERROR(checkpoint_.Get(name, shape).status());
  std::vector<float> values(static_cast<size_t>(size));
  RETURN_IF_ERROR(checkpoint_.ReadF32(name, values));
  ASSIGN_OR_RETURN(out, Upload(values));
  return Count(values.size() * DTypeBytes(checkpoint_.Find(name)->view.dtype));
}

absl::Status Loader::Linear(const LinearNames& names, int64_t n, int64_t k, LinearLayer& out) {
  ASSIGN_OR_RETURN(const WeightMatrix matrix, Open(names.weight, n, k));
  const DType dtype = matrix.native_dtype();
  ASSIGN_OR_RETURN(
      out.weight,
      backend_.LoadLinear(
          {.n = n, .k = k, .dtype = dtype, .read = [&](int64_t begin, int64_t end, void* to) {
             return ReadRectangle(matrix, dtype, {begin, end}, {0, k}, to);
           }}));
  RETURN_IF_ERROR(Count(matrix.stored_bytes()));
  if (names.bias.empty()) return absl::OkStatus();
  return Vector(names.bias, n, out.bias);
}

absl::Status Loader::Gqa(const AttentionNames& names, AttentionWeights& out) {
  const AttentionSpec& a = spec_.attention;
  RETURN_IF_ERROR(Linear(names.q, int64_t{a.heads} * a.head_dim, spec_.hidden, out.q));
  RETURN_IF_ERROR(Linear(names.k, int64_t{a.kv_heads} * a.head_dim, spec_.hidden, out.k));
  RETURN_IF_ERROR(Linear(names.v, int64_t{a.kv_heads} * a.head_dim, spec_.hidden, out.v));
  RETURN_IF_ERROR(Linear(names.o, spec_.hidden, int64_t{a.heads} * a.head_dim, out.o));
  if (!a.qk_norm) return absl::OkStatus();
  RETURN_IF_ERROR(Vector(names.q_norm, a.head_dim, out.q_norm));
  return Vector(names.k_norm, a.head_dim, out.k_norm);
}

absl::Status Loader::Mla(const AttentionNames& names, AttentionWeights& out) {
  const AttentionSpec& a = spec_.attention;
  const int64_t q_width = int64_t{a.heads} * (a.nope_dim + a.rope_dim);
  if (a.q_lora_rank == 0) {
    RETURN_IF_ERROR(Linear(names.q, q_width, spec_.hidden, out.q));
  } else {
    RETURN_IF_ERROR(Linear(names.q_a, a.q_lora_rank, spec_.hidden, out.q_a));
    RETURN_IF_ERROR(Vector(names.q_a_norm, a.q_lora_rank, out.q_a_norm));
    RETURN_IF_ERROR(Linear(names.q_b, q_width, a.q_lora_rank, out.q_b));
  }
  RETURN_IF_ERROR(Linear(names.kv_a, a.kv_lora_rank + a.rope_dim, spec_.hidden, out.kv_a));
  RETURN_IF_ERROR(Vector(names.kv_a_norm, a.kv_lora_rank, out.kv_a_norm));
  RETURN_IF_ERROR(KvB(names, out));
  return Linear(names.o, spec_.hidden, int64_t{a.heads} * a.v_dim, out.o);
}

absl::Status Loader::KvB(const AttentionNames& names, AttentionWeights& out) {
  const AttentionSpec& a = spec_.attention;
  const int64_t head_rows = a.nope_dim + a.v_dim;
  ASSIGN_OR_RETURN(const WeightMatrix matrix,
                   Open(names.kv_b.weight, a.heads * head_rows, a.kv_lora_rank));
  const DType dtype = matrix.native_dtype();
  for (int64_t head = 0; head < a.heads; ++head) {
    const Range u{head * head_rows, head * head_rows + a.nope_dim};
    const auto read_u = [&](int64_t begin, int64_t end, void* to) {
      return dtype == DType::kBF16
                 ? ReadTransposed(matrix, u, begin, end, static_cast<uint16_t*>(to))
                 : ReadTransposed(matrix, u, begin, end, static_cast<float*>(to));
    };
    const auto read_v = [&](int64_t begin, int64_t end, void* to) {
      return ReadRectangle(matrix, dtype, {u.end + begin, u.end + end}, {0, a.kv_lora_rank}, to);
    };
    ASSIGN_OR_RETURN(out.u_transposed.emplace_back(),
                     backend_.LoadLinear(
                         {.n = a.kv_lora_rank, .k = a.nope_dim, .dtype = dtype, .read = read_u}));
    ASSIGN_OR_RETURN(
        out.v_heads.emplace_back(),
        backend_.LoadLinear({.n = a.v_dim, .k = a.kv_lora_rank, .dtype = dtype, .read = read_v}));
  }
  return Count(matrix.stored_bytes());
}

absl::Status Loader::Mlp(const MlpNames& names, int64_t intermediate, MlpWeights& out) {
  out.intermediate = intermediate;
  RETURN_IF_ERROR(Linear(names.gate, intermediate, spec_.hidden, out.gate));
  RETURN_IF_ERROR(Linear(names.up, intermediate, spec_.hidden, out.up));
  return Linear(names.down, spec_.hidden, intermediate, out.down);
}

absl::StatusOr<LayerWeights> Loader::Layer(const LayerSpec& names) {
  LayerWeights out;
  RETURN_IF_ERROR(Vector(names.input_norm, spec_.hidden, out.input_norm));
  RETURN_IF_ERROR(Vector(names.post_attention_norm, spec_.hidden, out.post_attention_norm));
  RETURN_IF_ERROR(spec_.attention.kind == AttentionKind::kMla
                      ? Mla(names.attention, out.attention)
                      : Gqa(names.attention, out.attention));
  if (!names.moe) {
    RETURN_IF_ERROR(Mlp(names.mlp, names.dense_intermediate, out.mlp));
    return out;
  }
  RETURN_IF_ERROR(Linear({names.router_weight, ""}, spec_.moe.experts, spec_.hidden, out.router));
  if (!names.router_bias.empty()) {
    RETURN_IF_ERROR(Vector(names.router_bias, spec_.moe.experts, out.selection_bias));
  }
  if (spec_.moe.shared_intermediate > 0) {
    RETURN_IF_ERROR(Mlp(names.mlp, spec_.moe.shared_intermediate, out.mlp));
  }
  return out;
}

absl::Status Loader::Embedding(TensorView& out) {
  ASSIGN_OR_RETURN(const WeightMatrix matrix, Open(spec_.embedding, spec_.vocab, spec_.hidden));
  const DType dtype = matrix.native_dtype();
  const size_t row_bytes = static_cast<size_t>(spec_.hidden) * DTypeBytes(dtype);
  ASSIGN_OR_RETURN(void* memory, backend_.Allocate(row_bytes * static_cast<size_t>(spec_.vocab)));
  constexpr int64_t kRowsAtOnce = 1024;  // a staging buffer of a few MB
  std::vector<uint8_t> staging(row_bytes * kRowsAtOnce);
  for (int64_t row = 0; row < spec_.vocab; row += kRowsAtOnce) {
    const int64_t end = std::min<int64_t>(spec_.vocab, row + kRowsAtOnce);
    RETURN_IF_ERROR(ReadRectangle(matrix, dtype, {row, end}, {0, spec_.hidden}, staging.data()));
    backend_.CopyToDevice(static_cast<uint8_t*>(memory) + row_bytes * static_cast<size_t>(row),
                          staging.data(), row_bytes * static_cast<size_t>(end - row));
    RETURN_IF_ERROR(backend_.Synchronize());
  }
  out = {.data = memory, .dtype = dtype, .rank = 2, .shape = {spec_.vocab, spec_.hidden}};
  return Count(matrix.stored_bytes());
}

absl::Status Loader::Head(LinearLayer& out) {
  if (!spec_.tied_embeddings) return Linear({spec_.head, ""}, spec_.vocab, spec_.hidden, out);
  counting_ = false;  // the same tensor as the embedding
  const absl::Status status = Linear({spec_.embedding, ""}, spec_.vocab, spec_.hidden, out);
  counting_ = true;
  return status;
}

absl::StatusOr<ModelWeights> Loader::Load() {
  ModelWeights out;
  RETURN_IF_ERROR(Embedding(out.embedding));
  ASSIGN_OR_RETURN(out.inv_freq, Upload(spec_.rope.inv_freq));
  out.layers.reserve(spec_.layers.size());
  for (const LayerSpec& layer : spec_.layers) {
    ASSIGN_OR_RETURN(out.layers.emplace_back(), Layer(layer));
  }
  RETURN_IF_ERROR(Vector(spec_.final_norm, spec_.hidden, out.final_norm));
  RETURN_IF_ERROR(Head(out.head));
  return out;
}

}  // namespace

uint64_t DenseBytes(const Checkpoint& checkpoint, const ModelSpec& spec) {
  uint64_t bytes = 0;
  for (const TensorRole role : {TensorRole::kEmbedding, TensorRole::kVector, TensorRole::kLinear}) {
    bytes += StoredBytes(checkpoint, spec, role);
  }
  return bytes;
}

absl::StatusOr<ModelWeights> LoadModelWeights(
    const Checkpoint& checkpoint, const ModelSpec& spec, Backend& backend,
    const std::function<absl::Status(uint64_t)>& progress) {
  return Loader(checkpoint, spec, backend, progress).Load();
}

}  // namespace tandem::gpu
