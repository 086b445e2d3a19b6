#include "common/model/memory_plan.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/model/model_tensors.h"

namespace tandem {
namespace {

uint64_t Elements(const RequiredTensor& tensor) {
  uint64_t elements = 1;
  for (int64_t dim : tensor.shape) elements *= static_cast<uint64_t>(dim);
  return elements;
}

uint64_t ResidentBytes(const Checkpoint& checkpoint, const RequiredTensor& need) {
  // Packed formats have no tensor of the weight's own name.
  const Checkpoint::Tensor* tensor = checkpoint.Find(need.name);
  const bool keeps_bf16 =
      tensor != nullptr && need.role != TensorRole::kVector && tensor->view.dtype == DType::kBF16;
  return Elements(need) * DTypeBytes(keeps_bf16 ? DType::kBF16 : DType::kF32);
}

}  // namespace

uint64_t DenseWeightBytes(const Checkpoint& checkpoint, const ModelSpec& spec) {
  uint64_t bytes = 0;
  for (const RequiredTensor& need : RequiredTensors(spec)) {
    if (need.role == TensorRole::kRouted) continue;
    const uint64_t resident = ResidentBytes(checkpoint, need);
    bytes += resident;
    // The head is packed as a linear, so a tied one is a second copy.
    if (spec.tied_embeddings && need.name == spec.head) bytes += resident;
  }
  return bytes;
}

uint64_t KvBytesPerToken(const ModelSpec& spec, DType dtype) {
  const AttentionSpec& attention = spec.attention;
  const uint64_t elements = attention.kind == AttentionKind::kMla
                                ? uint64_t(attention.kv_lora_rank) + uint64_t(attention.rope_dim)
                                : 2 * uint64_t(attention.kv_heads) * uint64_t(attention.head_dim);
  return elements * spec.layers.size() * DTypeBytes(dtype);
}

MemoryPlan MakeMemoryPlan(const PlanRequest& request, const HostMemory& host) {
  MemoryPlan plan;
  plan.host = host;
  const auto add = [&plan](std::string what, uint64_t bytes) {
    plan.needed_bytes += bytes;
    plan.lines.push_back({std::move(what), bytes});
  };
  add("embeddings, attention, dense and shared weights", request.dense_bytes);
  if (request.hot_expert_bytes > 0) add("hot experts", request.hot_expert_bytes);
  for (size_t i = 0; i < request.expert_bytes.size(); ++i) {
    add(absl::StrCat("routed experts, worker ", i), request.expert_bytes[i]);
  }
  add(absl::StrCat("key/value cache, ", request.kv_tokens, " tokens of ",
                   request.kv_bytes_per_token, " B"),
      static_cast<uint64_t>(request.kv_tokens) * request.kv_bytes_per_token);
  if (request.link_bytes_per_worker > 0) {
    add(absl::StrCat("links, ", request.expert_bytes.size(), " of ",
                     FormatBytes(request.link_bytes_per_worker)),
        request.expert_bytes.size() * request.link_bytes_per_worker);
  }
  if (request.other_bytes > 0) add("activations and processes", request.other_bytes);
  return plan;
}

absl::Status MemoryPlan::Check() const {
  if (needed_bytes <= host.available_bytes) return absl::OkStatus();
  const auto largest = std::max_element(
      lines.begin(), lines.end(), [](const Line& a, const Line& b) { return a.bytes < b.bytes; });
  return absl::ResourceExhaustedError(absl::StrCat(
      "not enough host memory: ", FormatBytes(needed_bytes), " needed, ",
      FormatBytes(host.available_bytes), " available (", host.limited_by, "), ",
      FormatBytes(needed_bytes - host.available_bytes), " short; largest part: ",
      largest == lines.end() ? "" : absl::StrCat(largest->what, " ", FormatBytes(largest->bytes))));
}

std::string MemoryPlan::ToString() const {
  std::vector<Line> table = lines;
  table.push_back({"needed", needed_bytes});
  table.push_back({absl::StrCat("available (", host.limited_by, ")"), host.available_bytes});
  size_t width = 0;
  for (const Line& line : table) width = std::max(width, line.what.size());
  std::string text = "host memory plan\n";
  for (const Line& line : table) {
    absl::StrAppendFormat(&text, "  %-*s %12s\n", static_cast<int>(width), line.what,
                          FormatBytes(line.bytes));
  }
  return text;
}

std::string FormatBytes(uint64_t bytes) {
  constexpr const char* kUnits[] = {"KiB", "MiB", "GiB", "TiB"};
  if (bytes < 1024) return absl::StrCat(bytes, " B");
  double value = static_cast<double>(bytes);
  const char* unit = "B";
  for (const char* next : kUnits) {
    if (value < 1024) break;
    value /= 1024;
    unit = next;
  }
  return absl::StrFormat("%.2f %s", value, unit);
}

}  // namespace tandem
