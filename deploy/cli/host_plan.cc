#include "deploy/cli/host_plan.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/base/status.h"
#include "common/shm/layout.h"
#include "expert_worker/engine/model_experts.h"

namespace tandem {
namespace {

// Unless told otherwise the KV cache takes at most this part of what is available: weights come
// first.
constexpr uint64_t kKvCacheDivisor = 4;
// Code, gRPC, interpreter and buffers of all processes together; measured about 150 MB.
constexpr uint64_t kProcessBytes = uint64_t{256} << 20;

uint64_t ActivationBytes(const ServeOptions& options, const ModelSpec& spec) {
  // Per row: about a dozen vectors as wide as the hidden size or the widest MLP, in F32.
  int64_t widest = spec.hidden;
  for (const LayerSpec& layer : spec.layers) {
    widest = std::max<int64_t>(widest, layer.dense_intermediate);
  }
  widest = std::max<int64_t>(widest, spec.moe.shared_intermediate);
  const uint64_t rows = static_cast<uint64_t>(options.max_step_rows);
  const uint64_t logits = static_cast<uint64_t>(options.max_sequences) * spec.vocab;
  return 4 * (12 * rows * static_cast<uint64_t>(widest) + logits);
}

absl::StatusOr<uint64_t> LinkBytes(const ServeOptions& options, const ModelSpec& spec) {
  shm::BatchLimits limits;
  limits.max_rows = static_cast<uint32_t>(options.max_step_rows);
  limits.hidden = static_cast<uint32_t>(spec.hidden);
  limits.top_k = static_cast<uint32_t>(spec.moe.top_k);
  limits.lanes = 1;
  limits.num_experts = static_cast<uint32_t>(spec.moe.experts);
  limits.num_layers = static_cast<uint32_t>(spec.layers.size());
  limits.row_type = options.parity ? shm::RowType::kF32 : shm::RowType::kBf16;
  auto layout = shm::ComputeLayout(limits, shm::SlotsFor(limits.lanes));
  if (!layout.ok()) return layout.status();
  return layout->segment_bytes;
}

// Mapped experts are the page cache's, which gives way: they are chosen where memory is short.
absl::StatusOr<std::vector<uint64_t>> ExpertBytes(const ServeOptions& options,
                                                  const ModelSpec& spec,
                                                  const Checkpoint& checkpoint,
                                                  std::vector<uint32_t> shares) {
  if (spec.moe.experts == 0) return std::vector<uint64_t>();
  if (shares.empty()) shares = {1};  // the gpu worker's own
  if (options.weights == "map") return std::vector<uint64_t>(shares.size(), 0);
  return expert::StoreBytes(checkpoint, spec, shares);
}

}  // namespace

absl::StatusOr<HostPlan> PlanHost(const ServeOptions& options, const ModelSpec& spec,
                                  const Checkpoint& checkpoint, const std::vector<uint32_t>& shares,
                                  const HostMemory& host) {
  HostPlan plan;
  if (options.max_context > spec.max_context) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--max-context=", options.max_context, " is longer than the model's ", spec.max_context));
  }
  plan.max_context = options.max_context > 0 ? options.max_context : spec.max_context;
  PlanRequest request;
  request.dense_bytes = DenseWeightBytes(checkpoint, spec);
  request.kv_bytes_per_token = KvBytesPerToken(spec, options.parity ? DType::kF32 : DType::kBF16);
  plan.kv_cache_tokens = options.kv_cache_tokens;
  if (plan.kv_cache_tokens == 0) {
    const uint64_t affordable =
        host.available_bytes / kKvCacheDivisor / std::max<uint64_t>(1, request.kv_bytes_per_token);
    plan.kv_cache_tokens = std::clamp<int64_t>(static_cast<int64_t>(affordable), plan.max_context,
                                               int64_t{plan.max_context} * options.max_sequences);
  }
  plan.max_context = static_cast<int>(std::min<int64_t>(plan.max_context, plan.kv_cache_tokens));
  request.kv_tokens = plan.kv_cache_tokens;
  ASSIGN_OR_RETURN(plan.expert_bytes, ExpertBytes(options, spec, checkpoint, shares));
  request.expert_bytes = plan.expert_bytes;
  if (!shares.empty() && spec.moe.experts > 0) {
    ASSIGN_OR_RETURN(request.link_bytes_per_worker, LinkBytes(options, spec));
  }
  request.hot_expert_bytes = static_cast<uint64_t>(options.hot_experts_gb * 1e9);
  request.other_bytes = kProcessBytes + ActivationBytes(options, spec);
  plan.memory = MakeMemoryPlan(request, host);
  RETURN_IF_ERROR(plan.memory.Check());
  return plan;
}

}  // namespace tandem
