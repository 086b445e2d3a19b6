#include "gpu_worker/activations.h"

#include <algorithm>

#include "common/base/status.h"

namespace tandem::gpu {
namespace {

class Allocator {
 public:
  Allocator(Backend& backend, uint64_t& total) : backend_(backend), total_(total) {}

  absl::Status Make(int64_t rows, int64_t width, Matrix& out) {
    if (width == 0) return absl::OkStatus();
    ASSIGN_OR_RETURN(void* memory, Bytes(static_cast<size_t>(rows * width) * sizeof(float)));
    out = {static_cast<float*>(memory), width};
    return absl::OkStatus();
  }
  absl::StatusOr<void*> Bytes(size_t bytes) {
    total_ += bytes;
    return backend_.Allocate(bytes);
  }

 private:
  Backend& backend_;
  uint64_t& total_;
};

absl::Status MakeAttention(Allocator& allocator, const AttentionSpec& a, int64_t rows,
                           Activations& out) {
  const int64_t heads = a.heads;
  if (a.kind == AttentionKind::kGqa) {
    const int64_t kv_width = int64_t{a.kv_heads} * a.head_dim;
    RETURN_IF_ERROR(allocator.Make(rows, heads * a.head_dim, out.q));
    RETURN_IF_ERROR(allocator.Make(rows, kv_width, out.k));
    RETURN_IF_ERROR(allocator.Make(rows, kv_width, out.v));
    return allocator.Make(rows, heads * a.head_dim, out.context);
  }
  RETURN_IF_ERROR(allocator.Make(rows, heads * (a.nope_dim + a.rope_dim), out.q));
  RETURN_IF_ERROR(allocator.Make(rows, a.q_lora_rank, out.q_a));
  RETURN_IF_ERROR(allocator.Make(rows, a.kv_lora_rank + a.rope_dim, out.kv));
  RETURN_IF_ERROR(allocator.Make(rows, heads * a.kv_lora_rank, out.q_latent));
  RETURN_IF_ERROR(allocator.Make(rows, heads * a.kv_lora_rank, out.context_latent));
  return allocator.Make(rows, heads * a.v_dim, out.context);
}

absl::Status MakeMlp(Allocator& allocator, const ModelSpec& spec, int64_t rows, Activations& out) {
  int64_t width = spec.moe.shared_intermediate;
  for (const LayerSpec& layer : spec.layers) {
    if (!layer.moe) width = std::max<int64_t>(width, layer.dense_intermediate);
  }
  RETURN_IF_ERROR(allocator.Make(rows, width, out.gate));
  RETURN_IF_ERROR(allocator.Make(rows, width, out.up));
  RETURN_IF_ERROR(allocator.Make(rows, spec.moe.experts, out.router_logits));
  const size_t picks = static_cast<size_t>(rows) * static_cast<size_t>(spec.moe.top_k);
  for (size_t i = 0; i < spec.layers.size(); ++i) {
    if (!spec.layers[i].moe) continue;
    RouterPicks layer{.layer = static_cast<int>(i)};
    ASSIGN_OR_RETURN(void* ids, allocator.Bytes(picks * sizeof(uint16_t)));
    ASSIGN_OR_RETURN(void* weights, allocator.Bytes(picks * sizeof(float)));
    layer.ids = static_cast<uint16_t*>(ids);
    layer.weights = static_cast<float*>(weights);
    out.picks.push_back(layer);
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Activations> Activations::Create(Backend& backend, const ModelSpec& spec,
                                                int max_rows, int head_rows) {
  Activations out;
  Allocator allocator(backend, out.bytes);
  RETURN_IF_ERROR(allocator.Make(max_rows, spec.hidden, out.hidden));
  RETURN_IF_ERROR(allocator.Make(max_rows, spec.hidden, out.normed));
  RETURN_IF_ERROR(allocator.Make(max_rows, spec.hidden, out.block));
  RETURN_IF_ERROR(allocator.Make(max_rows, spec.rope.rotary_dims, out.angles));
  RETURN_IF_ERROR(MakeAttention(allocator, spec.attention, max_rows, out));
  RETURN_IF_ERROR(MakeMlp(allocator, spec, max_rows, out));
  RETURN_IF_ERROR(allocator.Make(head_rows, spec.hidden, out.head_hidden));
  RETURN_IF_ERROR(allocator.Make(head_rows, spec.vocab, out.logits));
  return out;
}

}  // namespace tandem::gpu
