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
  return allocator.Make(rows, spec.moe.experts, out.router_logits);
}

template <typename T>
absl::Status MakeArray(Allocator& allocator, size_t count, T*& out) {
  ASSIGN_OR_RETURN(void* memory, allocator.Bytes(count * sizeof(T)));
  out = static_cast<T*>(memory);
  return absl::OkStatus();
}

// All but what is one array over the layers.
absl::Status MakeLayerPicks(Allocator& allocator, size_t picks, const SplitOptions& split,
                            RouterPicks& out) {
  RETURN_IF_ERROR(MakeArray(allocator, picks, out.weights));
  if (!split.any()) return absl::OkStatus();
  RETURN_IF_ERROR(MakeArray(allocator, picks, out.worker_ids));
  if (split.residents) RETURN_IF_ERROR(MakeArray(allocator, picks, out.resident_slots));
  if (split.deferral) RETURN_IF_ERROR(MakeArray(allocator, picks, out.deferred));
  return absl::OkStatus();
}

// The element `count` on; null stays null.
template <typename T>
T* Advance(T* pointer, int64_t count) {
  return pointer == nullptr ? nullptr : pointer + count;
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

Activations Activations::FromRow(int row) const {
  Activations out = *this;
  for (Matrix* m : {&out.hidden, &out.normed, &out.block, &out.angles, &out.q, &out.k, &out.v,
                    &out.context, &out.q_a, &out.kv, &out.q_latent, &out.context_latent, &out.gate,
                    &out.up, &out.router_logits}) {
    m->data = Advance(m->data, row * m->ld);
  }
  return out;
}

RouterPicks RouterPicks::FromRow(int row, int top_k) const {
  const int64_t picks = int64_t{row} * top_k;
  return {.layer = layer,
          .ids = ids + picks,
          .weights = weights + picks,
          .worker_ids = Advance(worker_ids, picks),
          .resident_slots = Advance(resident_slots, picks),
          .deferred = Advance(deferred, picks),
          .sums = Advance(sums, row),
          .slot_of_expert = slot_of_expert};
}

absl::StatusOr<std::vector<RouterPicks>> MakePicks(Backend& backend, const ModelSpec& spec,
                                                   int max_rows, const SplitOptions& split,
                                                   uint64_t& bytes) {
  Allocator allocator(backend, bytes);
  const auto rows = static_cast<size_t>(max_rows);
  const size_t count = rows * static_cast<size_t>(spec.moe.top_k);
  std::vector<RouterPicks> out;
  for (size_t i = 0; i < spec.layers.size(); ++i) {
    if (!spec.layers[i].moe) continue;
    RouterPicks& picks = out.emplace_back(RouterPicks{.layer = static_cast<int>(i)});
    RETURN_IF_ERROR(MakeLayerPicks(allocator, count, split, picks));
  }
  if (out.empty()) return out;
  out.back().deferred = nullptr;
  uint16_t* ids = nullptr;
  PickSums* sums = nullptr;
  RETURN_IF_ERROR(MakeArray(allocator, out.size() * count, ids));
  if (split.any()) RETURN_IF_ERROR(MakeArray(allocator, out.size() * rows, sums));
  for (size_t i = 0; i < out.size(); ++i) {
    out[i].ids = ids + i * count;
    if (sums != nullptr) out[i].sums = sums + i * rows;
  }
  return out;
}

}  // namespace tandem::gpu
