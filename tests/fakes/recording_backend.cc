#include "tests/fakes/recording_backend.h"

#include <algorithm>
#include <cstring>
#include <sstream>
#include <type_traits>
#include <utility>

#include "gpu_worker/resident_experts.h"

namespace tandem::gpu {
namespace {

constexpr size_t kAlignment = 64;

// Builds "name=value name=value".
class Text {
 public:
  template <typename T>
  Text& Add(const char* name, const T& value) {
    stream_ << (stream_.tellp() > 0 ? " " : "") << name << '=';
    if constexpr (std::is_pointer_v<T>) {
      stream_ << static_cast<const void*>(value);
    } else if constexpr (std::is_enum_v<T>) {
      stream_ << static_cast<int>(value);
    } else {
      stream_ << value;
    }
    return *this;
  }
  Text& Add(const Rows& rows) { return Add("bound", rows.bound).Add("count", rows.count); }
  Text& Add(const char* name, const ConstMatrix& m) { return Add(name, m.data).Add("ld", m.ld); }
  Text& Add(const char* name, const Matrix& m) { return Add(name, ConstMatrix(m)); }
  Text& Add(const RowPlace& place) {
    return Add("positions", place.positions)
        .Add("sequence", place.sequence)
        .Add("block_table", place.block_table)
        .Add("blocks_per_sequence", place.blocks_per_sequence)
        .Add("block_tokens", place.block_tokens);
  }
  Text& Add(const PagedCache& cache) {
    return Add("cache_k", cache.k)
        .Add("cache_v", cache.v)
        .Add("dtype", cache.dtype)
        .Add("block_count", cache.block_count)
        .Add("k_width", cache.k_width)
        .Add("v_width", cache.v_width);
  }
  std::string Take() { return stream_.str(); }

 private:
  std::ostringstream stream_;
};

std::string Describe(const EmbedArgs& a) {
  return Text().Add(a.rows).Add("table", a.table.data).Add("ids", a.ids).Add("out", a.out).Take();
}

std::string Describe(const RmsNormArgs& a) {
  return Text()
      .Add(a.rows)
      .Add("x", a.x)
      .Add("out", a.out)
      .Add("weight", a.weight)
      .Add("width", a.width)
      .Add("groups", a.groups)
      .Add("eps", a.eps)
      .Take();
}

std::string Describe(const LinearArgs& a) {
  return Text()
      .Add(a.rows)
      .Add("weight", a.weight)
      .Add("bias", a.bias)
      .Add("x", a.x)
      .Add("y", a.y)
      .Take();
}

std::string Describe(const HeadLinearArgs& a) {
  return Text()
      .Add(a.rows)
      .Add("weights", a.weights)
      .Add("heads", a.heads)
      .Add("x", a.x)
      .Add("x_head_stride", a.x_head_stride)
      .Add("y", a.y)
      .Add("y_head_stride", a.y_head_stride)
      .Take();
}

std::string Describe(const RopeAnglesArgs& a) {
  return Text()
      .Add(a.rows)
      .Add("positions", a.positions)
      .Add("inv_freq", a.inv_freq)
      .Add("half", a.half)
      .Add("factor", a.factor)
      .Add("out", a.out)
      .Take();
}

std::string Describe(const RopeArgs& a) {
  return Text()
      .Add(a.rows)
      .Add("x", a.x)
      .Add("heads", a.heads)
      .Add("head_stride", a.head_stride)
      .Add("offset", a.offset)
      .Add("half", a.half)
      .Add("interleaved", a.interleaved)
      .Add("angles", a.angles)
      .Take();
}

std::string Describe(const CacheWriteArgs& a) {
  return Text().Add(a.rows).Add(a.place).Add("k", a.k).Add("v", a.v).Add(a.cache).Take();
}

std::string Describe(const AttentionArgs& a) {
  return Text()
      .Add(a.rows)
      .Add(a.place)
      .Add(a.cache)
      .Add("q", a.q)
      .Add("out", a.out)
      .Add("heads", a.heads)
      .Add("kv_heads", a.kv_heads)
      .Add("head_dim", a.head_dim)
      .Add("scale", a.scale)
      .Add("window_tokens", a.window_tokens)
      .Add("sinks", a.sinks)
      .Take();
}

std::string Describe(const LatentAttentionArgs& a) {
  return Text()
      .Add(a.rows)
      .Add(a.place)
      .Add(a.cache)
      .Add("q_latent", a.q_latent)
      .Add("q_rope", a.q_rope)
      .Add("q_rope_head_stride", a.q_rope_head_stride)
      .Add("out", a.out)
      .Add("heads", a.heads)
      .Add("latent_dim", a.latent_dim)
      .Add("rope_dim", a.rope_dim)
      .Add("scale", a.scale)
      .Take();
}

std::string Describe(const SiluMulArgs& a) {
  return Text()
      .Add(a.rows)
      .Add("gate", a.gate)
      .Add("up", a.up)
      .Add("out", a.out)
      .Add("width", a.width)
      .Take();
}

std::string Describe(const AddArgs& a) {
  return Text().Add(a.rows).Add("x", a.x).Add("y", a.y).Add("width", a.width).Take();
}

std::string Describe(const RouterArgs& a) {
  return Text()
      .Add(a.rows)
      .Add("logits", a.logits)
      .Add("selection_bias", a.selection_bias)
      .Add("experts", a.experts)
      .Add("top_k", a.top_k)
      .Add("sigmoid", a.sigmoid)
      .Add("groups", a.groups)
      .Add("groups_kept", a.groups_kept)
      .Add("group_score_max", a.group_score_max)
      .Add("renormalize", a.renormalize)
      .Add("renormalize_eps", a.renormalize_eps)
      .Add("factor", a.factor)
      .Add("ids", a.ids)
      .Add("weights", a.weights)
      .Take();
}

std::string Describe(const SplitPicksArgs& a) {
  return Text()
      .Add(a.rows)
      .Add("ids", a.ids)
      .Add("weights", a.weights)
      .Add("experts", a.experts)
      .Add("top_k", a.top_k)
      .Add("slot_of_expert", a.slot_of_expert)
      .Add("limits", a.limits)
      .Add("may_defer", a.may_defer)
      .Add("worker_ids", a.worker_ids)
      .Add("resident_slots", a.resident_slots)
      .Add("deferred", a.deferred)
      .Add("sums", a.sums)
      .Take();
}

std::string Describe(const ExpertSubmitArgs& a) {
  return Text()
      .Add(a.rows)
      .Add("link", a.link)
      .Add("lane", a.lane)
      .Add("layer", a.layer)
      .Add("x", a.x)
      .Add("ids", a.ids)
      .Add("weights", a.weights)
      .Add("deferred", a.deferred)
      .Take();
}

std::string Describe(const ExpertWaitArgs& a) {
  return Text()
      .Add(a.rows)
      .Add("link", a.link)
      .Add("lane", a.lane)
      .Add("layer", a.layer)
      .Add("out", a.out)
      .Take();
}

std::string Describe(const ResidentExpertsArgs& a) {
  return Text()
      .Add(a.rows)
      .Add("experts", a.experts)
      .Add("layer", a.layer)
      .Add("x", a.x)
      .Add("slots", a.slots)
      .Add("weights", a.weights)
      .Add("out", a.out)
      .Take();
}

std::string Describe(const StreamExpertsArgs& a) {
  return Text()
      .Add("experts", a.experts)
      .Add("layer", a.layer)
      .Add("first_slot", a.first_slot)
      .Add("count", a.count)
      .Take();
}

std::string Describe(const GatherRowsArgs& a) {
  return Text()
      .Add(a.rows)
      .Add("x", a.x)
      .Add("indices", a.indices)
      .Add("out", a.out)
      .Add("width", a.width)
      .Take();
}

std::string Describe(const SampleArgs& a) {
  return Text()
      .Add(a.rows)
      .Add("logits", a.logits)
      .Add("vocab", a.vocab)
      .Add("params", a.params)
      .Add("bias_ids", a.bias_ids)
      .Add("bias_values", a.bias_values)
      .Add("banned_ids", a.banned_ids)
      .Add("token_counts", a.token_counts)
      .Add("tokens", a.tokens)
      .Take();
}

std::string Describe(const LogprobsArgs& a) {
  return Text()
      .Add(a.rows)
      .Add("logits", a.logits)
      .Add("vocab", a.vocab)
      .Add("targets", a.targets)
      .Add("top", a.top)
      .Add("max_top", a.max_top)
      .Add("target_logprobs", a.target_logprobs)
      .Add("target_ranks", a.target_ranks)
      .Add("top_ids", a.top_ids)
      .Add("top_logprobs", a.top_logprobs)
      .Take();
}

std::string Describe(const BlockCopyArgs& a) {
  return Text()
      .Add(a.cache)
      .Add("block_tokens", a.block_tokens)
      .Add("count", a.count)
      .Add("source", a.source)
      .Add("target", a.target)
      .Take();
}

}  // namespace

std::string FormatOps(const std::vector<RecordedOp>& ops) {
  std::string text;
  for (const RecordedOp& op : ops) text += op.name + " " + op.args + "\n";
  return text;
}

RecordingBackend::RecordingBackend(Backend* forward) : forward_(forward) {}
RecordingBackend::~RecordingBackend() = default;

void RecordingBackend::Record(std::string name, std::string args) {
  ops_.push_back({std::move(name), std::move(args), in_graph_});
}

std::vector<RecordedOp> RecordingBackend::TakeOps() { return std::exchange(ops_, {}); }

std::vector<RecordedOp> RecordingBackend::GraphOps(const std::vector<RecordedOp>& ops) {
  std::vector<RecordedOp> inside;
  std::copy_if(ops.begin(), ops.end(), std::back_inserter(inside),
               [](const RecordedOp& op) { return op.in_graph; });
  return inside;
}

absl::StatusOr<void*> RecordingBackend::Allocate(size_t bytes) {
  if (forward_ != nullptr) return forward_->Allocate(bytes);
  memory_.push_back(std::make_unique<unsigned char[]>(bytes + kAlignment));
  void* start = memory_.back().get();
  size_t space = bytes + kAlignment;
  return std::align(kAlignment, bytes, start, space);
}

absl::StatusOr<std::unique_ptr<LinearWeight>> RecordingBackend::LoadLinear(
    const MatrixSource& source) {
  if (forward_ != nullptr) return forward_->LoadLinear(source);
  auto weight = std::make_unique<LinearWeight>();
  weight->n = source.n;
  weight->k = source.k;
  return weight;
}

absl::StatusOr<std::unique_ptr<ResidentExperts>> RecordingBackend::MakeResidentExperts(
    const ResidentShape& shape) {
  if (forward_ != nullptr) return forward_->MakeResidentExperts(shape);
  return absl::UnimplementedError("nothing to forward to");
}

void RecordingBackend::GraphBegin(const GraphKey& key) {
  Record("GraphBegin", Text()
                           .Add("bucket", key.bucket)
                           .Add("second_bucket", key.second_bucket)
                           .Add("measured", key.measured)
                           .Add("traced", key.traced)
                           .Take());
  in_graph_ = true;
  if (forward_ != nullptr) forward_->GraphBegin(key);
}

void RecordingBackend::GraphEnd() {
  in_graph_ = false;
  Record("GraphEnd", "");
  if (forward_ != nullptr) forward_->GraphEnd();
}

absl::Status RecordingBackend::Synchronize() {
  return forward_ != nullptr ? forward_->Synchronize() : absl::OkStatus();
}

void RecordingBackend::CopyToDevice(void* device, const void* host, size_t bytes) {
  Record("CopyToDevice", Text().Add("device", device).Add("bytes", bytes).Take());
  if (forward_ != nullptr) {
    forward_->CopyToDevice(device, host, bytes);
  } else if (bytes > 0) {
    std::memcpy(device, host, bytes);
  }
}

void RecordingBackend::CopyToHost(void* host, const void* device, size_t bytes) {
  Record("CopyToHost", Text().Add("device", device).Add("bytes", bytes).Take());
  if (forward_ != nullptr) {
    forward_->CopyToHost(host, device, bytes);
  } else if (bytes > 0) {
    std::memcpy(host, device, bytes);
  }
}

void RecordingBackend::CopyRunsToHost(const RunsToHostArgs& args) {
  Record("CopyRunsToHost", Text()
                               .Add("device", args.device)
                               .Add("run_bytes", args.run_bytes)
                               .Add("stride_bytes", args.stride_bytes)
                               .Add("count", args.count)
                               .Take());
  if (forward_ != nullptr) {
    forward_->CopyRunsToHost(args);
    return;
  }
  for (size_t i = 0; i < args.count; ++i) {
    std::memcpy(static_cast<char*>(args.host) + i * args.stride_bytes,
                static_cast<const char*>(args.device) + i * args.stride_bytes, args.run_bytes);
  }
}

void RecordingBackend::RecordEvent(Stream stream, int event) {
  Record("RecordEvent", Text().Add("stream", stream).Add("event", event).Take());
  if (forward_ != nullptr) forward_->RecordEvent(stream, event);
}

void RecordingBackend::WaitEvent(Stream stream, int event) {
  Record("WaitEvent", Text().Add("stream", stream).Add("event", event).Take());
  if (forward_ != nullptr) forward_->WaitEvent(stream, event);
}

void RecordingBackend::Stamp(int64_t* device_ns) {
  Record("Stamp", Text().Add("device_ns", device_ns).Take());
  if (forward_ != nullptr) forward_->Stamp(device_ns);
}

void RecordingBackend::Embed(const EmbedArgs& args) {
  Record("Embed", Describe(args));
  if (forward_ != nullptr) forward_->Embed(args);
}

void RecordingBackend::RmsNorm(const RmsNormArgs& args) {
  Record("RmsNorm", Describe(args));
  if (forward_ != nullptr) forward_->RmsNorm(args);
}

void RecordingBackend::Linear(const LinearArgs& args) {
  Record("Linear", Describe(args));
  if (forward_ != nullptr) forward_->Linear(args);
}

void RecordingBackend::HeadLinear(const HeadLinearArgs& args) {
  Record("HeadLinear", Describe(args));
  if (forward_ != nullptr) forward_->HeadLinear(args);
}

void RecordingBackend::RopeAngles(const RopeAnglesArgs& args) {
  Record("RopeAngles", Describe(args));
  if (forward_ != nullptr) forward_->RopeAngles(args);
}

void RecordingBackend::Rope(const RopeArgs& args) {
  Record("Rope", Describe(args));
  if (forward_ != nullptr) forward_->Rope(args);
}

void RecordingBackend::CacheWrite(const CacheWriteArgs& args) {
  Record("CacheWrite", Describe(args));
  if (forward_ != nullptr) forward_->CacheWrite(args);
}

void RecordingBackend::Attention(const AttentionArgs& args) {
  Record("Attention", Describe(args));
  if (forward_ != nullptr) forward_->Attention(args);
}

void RecordingBackend::LatentAttention(const LatentAttentionArgs& args) {
  Record("LatentAttention", Describe(args));
  if (forward_ != nullptr) forward_->LatentAttention(args);
}

void RecordingBackend::SiluMul(const SiluMulArgs& args) {
  Record("SiluMul", Describe(args));
  if (forward_ != nullptr) forward_->SiluMul(args);
}

void RecordingBackend::Add(const AddArgs& args) {
  Record("Add", Describe(args));
  if (forward_ != nullptr) forward_->Add(args);
}

void RecordingBackend::Router(const RouterArgs& args) {
  Record("Router", Describe(args));
  if (forward_ != nullptr) forward_->Router(args);
}

void RecordingBackend::SplitPicks(const SplitPicksArgs& args) {
  Record("SplitPicks", Describe(args));
  if (forward_ != nullptr) forward_->SplitPicks(args);
}

void RecordingBackend::ExpertSubmit(const ExpertSubmitArgs& args) {
  Record("ExpertSubmit", Describe(args));
  if (forward_ != nullptr) forward_->ExpertSubmit(args);
}

void RecordingBackend::ExpertWait(const ExpertWaitArgs& args) {
  Record("ExpertWait", Describe(args));
  if (forward_ != nullptr) forward_->ExpertWait(args);
}

void RecordingBackend::StreamExperts(const StreamExpertsArgs& args) {
  Record("StreamExperts", Describe(args));
  if (forward_ != nullptr) forward_->StreamExperts(args);
}

void RecordingBackend::RunResidentExperts(const ResidentExpertsArgs& args) {
  Record("RunResidentExperts", Describe(args));
  if (forward_ != nullptr) forward_->RunResidentExperts(args);
}

void RecordingBackend::GatherRows(const GatherRowsArgs& args) {
  Record("GatherRows", Describe(args));
  if (forward_ != nullptr) forward_->GatherRows(args);
}

void RecordingBackend::Sample(const SampleArgs& args) {
  Record("Sample", Describe(args));
  if (forward_ != nullptr) forward_->Sample(args);
}

void RecordingBackend::Logprobs(const LogprobsArgs& args) {
  Record("Logprobs", Describe(args));
  if (forward_ != nullptr) forward_->Logprobs(args);
}

void RecordingBackend::CopyBlocks(const BlockCopyArgs& args) {
  Record("CopyBlocks", Describe(args));
  if (forward_ != nullptr) forward_->CopyBlocks(args);
}

}  // namespace tandem::gpu
