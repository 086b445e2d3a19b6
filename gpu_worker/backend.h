#pragma once

// The seam between the model graph and whatever executes it: one op a method, on device memory,
// ordered by stream, without model knowledge. Written for CUDA graphs: at enqueue time no op reads
// a value that changes between steps. Row counts, positions, ids and block tables are device
// memory; the host passes upper bounds (the bucket) only. The CPU backend executes each op as it is
// enqueued and its device memory is host memory; graphs, streams and events are no-ops there.
//
// Thread safety: one thread enqueues. Shapes are row-major; `ld` is the distance in elements
// between rows. All activations are F32. Every op is row-independent and sums in an order fixed by
// the op, so a row's result does not depend on the other rows of its step.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/tensor/dtype.h"
#include "common/tensor/tensor_view.h"

namespace tandem::gpu {

class ExpertLink;       // gpu_worker/expert_link.h
class ResidentExperts;  // gpu_worker/resident_experts.h
class ExpertWeightSource;
struct ResidentShape;

enum class Stream : uint8_t { kCompute, kCopy };

// How many rows an op works on: *count (device) of at most `bound` (host).
struct Rows {
  int bound = 0;
  const int32_t* count = nullptr;
};

// A weight matrix [n, k] in the backend's own layout, made by Backend::LoadLinear.
class LinearWeight {
 public:
  virtual ~LinearWeight() = default;
  int64_t n = 0;
  int64_t k = 0;
};

// Where LoadLinear gets a matrix from: `read` fills rows [row_begin, row_end) of [n, k] as `dtype`
// (kF32 or kBF16), row-major without gaps. Called from several threads at once.
struct MatrixSource {
  int64_t n = 0;
  int64_t k = 0;
  DType dtype = DType::kF32;
  std::function<absl::Status(int64_t row_begin, int64_t row_end, void* out)> read;
};

// A strided activation: element (row, i) is at data[row * ld + i].
struct Matrix {
  float* data = nullptr;
  int64_t ld = 0;
};
struct ConstMatrix {
  const float* data = nullptr;
  int64_t ld = 0;
  ConstMatrix() = default;
  ConstMatrix(const float* d, int64_t l) : data(d), ld(l) {}
  ConstMatrix(Matrix m) : data(m.data), ld(m.ld) {}  // NOLINT: a view of the same memory
};

// Where each row of the step stands. All device memory.
struct RowPlace {
  const int32_t* positions = nullptr;    // [rows]
  const int32_t* sequence = nullptr;     // [rows]: row of `block_table`
  const int32_t* block_table = nullptr;  // [sequences, blocks_per_sequence]
  int blocks_per_sequence = 0;
  int block_tokens = 0;
};

// One layer's paged cache: K is [blocks, block_tokens, kv_heads * head_dim], V likewise.
// MLA keeps one latent row a token, [blocks, block_tokens, kv_lora + rope], in `k`; `v` is null.
struct PagedCache {
  void* k = nullptr;
  void* v = nullptr;
  DType dtype = DType::kF32;  // kF32 or kBF16
  int block_count = 0;
  int64_t k_width = 0;
  int64_t v_width = 0;
};

struct EmbedArgs {
  Rows rows;
  TensorView table;  // [vocab, hidden], F32 or BF16
  const int32_t* ids = nullptr;
  Matrix out;
};

// Normalizes `groups` consecutive vectors of `width` in every row: y = w * x / sqrt(mean(x^2) +
// eps). In place when out == x. `weight` [width] is shared by the groups.
struct RmsNormArgs {
  Rows rows;
  ConstMatrix x;
  Matrix out;
  const float* weight = nullptr;
  int64_t width = 0;
  int groups = 1;
  float eps = 0;
};

// y = x W^T (+ bias).
struct LinearArgs {
  Rows rows;
  const LinearWeight* weight = nullptr;
  const float* bias = nullptr;  // [n] or null
  ConstMatrix x;
  Matrix y;
};

// For each head h: y[r, h * n ...] = W_h x[r, h * x_head_stride ...]; `weights` has one [n, k] a
// head.
struct HeadLinearArgs {
  Rows rows;
  const std::unique_ptr<LinearWeight>* weights = nullptr;
  int heads = 0;
  ConstMatrix x;
  int64_t x_head_stride = 0;
  Matrix y;
  int64_t y_head_stride = 0;
};

// out[r] = cos(p * inv_freq_j) * factor for j in [0, half), then sin likewise: [rows, 2 * half].
struct RopeAnglesArgs {
  Rows rows;
  const int32_t* positions = nullptr;
  const float* inv_freq = nullptr;  // [half]
  int half = 0;
  float factor = 1;
  Matrix out;
};

// Rotates dims [offset, offset + 2 * half) of each head, in place.
struct RopeArgs {
  Rows rows;
  Matrix x;
  int heads = 0;
  int64_t head_stride = 0;
  int64_t offset = 0;
  int half = 0;
  bool interleaved = false;
  ConstMatrix angles;  // of RopeAngles
};

// Stores one row a token at its position's place in the cache.
struct CacheWriteArgs {
  Rows rows;
  RowPlace place;
  ConstMatrix k;  // [rows, cache.k_width]
  ConstMatrix v;  // [rows, cache.v_width]; unused where the cache has no V
  PagedCache cache;
};

// Causal attention of each row over its sequence's cached keys (its own included).
struct AttentionArgs {
  Rows rows;
  RowPlace place;
  PagedCache cache;
  ConstMatrix q;  // [rows, heads * head_dim]
  Matrix out;     // [rows, heads * head_dim]
  int heads = 0;
  int kv_heads = 0;
  int head_dim = 0;
  float scale = 0;
  int window_tokens = 0;         // 0: all keys
  const float* sinks = nullptr;  // [heads] or null
};

// MLA in latent form: score = scale * (q_latent . c + q_rope . k_rope), out = sum p c, per head.
struct LatentAttentionArgs {
  Rows rows;
  RowPlace place;
  PagedCache cache;
  ConstMatrix q_latent;  // [rows, heads * latent_dim]
  ConstMatrix q_rope;    // element (r, h, i) at r * ld + h * q_rope_head_stride + i
  int64_t q_rope_head_stride = 0;
  Matrix out;  // [rows, heads * latent_dim]
  int heads = 0;
  int latent_dim = 0;
  int rope_dim = 0;
  float scale = 0;
};

struct SiluMulArgs {
  Rows rows;
  ConstMatrix gate;
  ConstMatrix up;
  Matrix out;
  int64_t width = 0;
};

// x += y.
struct AddArgs {
  Rows rows;
  Matrix x;
  ConstMatrix y;
  int64_t width = 0;
};

// Chooses experts from router logits (notes/models.md 1.4). Ties go to the lowest index. `ids` come
// in descending order of selection score; a row whose logits are not finite gets the sentinel
// 0xFFFF in all places and weights 0.
struct RouterArgs {
  Rows rows;
  ConstMatrix logits;  // [rows, experts]
  const float* selection_bias = nullptr;
  int experts = 0;
  int top_k = 0;
  bool sigmoid = false;
  int groups = 1;
  int groups_kept = 1;
  bool group_score_max = false;
  bool renormalize = true;
  float renormalize_eps = 0;
  float factor = 1;
  uint16_t* ids = nullptr;   // [rows, top_k]
  float* weights = nullptr;  // [rows, top_k]
};

inline constexpr uint16_t kNoExpert = 0xFFFF;

// How much of a token's routed experts a step may defer to the next layer (Expert Deferral).
// Device memory: it may change from step to step.
struct DeferralLimits {
  int32_t max_deferred = 0;  // experts of a token and layer; 0: none
  float max_mass = 0;        // share of the token's router weight, 0 to 1
};

// What SplitPicks did with one row.
struct PickSums {
  float deferred_mass = 0;  // share of the row's router weight, 0 to 1
  uint16_t deferred = 0;    // picks
  uint16_t resident = 0;
};

// Splits router picks three ways: experts resident on the device, experts of the expert workers,
// and of these the ones whose sums may come a layer late. In ascending order of weight (ties: the
// later rank first) a pick that is not resident is deferred while fewer than max_deferred are and
// their weights sum to at most max_mass of the row's.
struct SplitPicksArgs {
  Rows rows;
  const uint16_t* ids = nullptr;   // [rows, top_k] of Router
  const float* weights = nullptr;  // [rows, top_k]
  int experts = 0;
  int top_k = 0;
  const uint16_t* slot_of_expert = nullptr;  // [experts], kNoExpert: not resident; null: none is
  const DeferralLimits* limits = nullptr;    // null: nothing is deferred
  const uint8_t* may_defer = nullptr;        // [rows]: rows with 0 defer nothing; null: all may
  uint16_t* worker_ids = nullptr;            // [rows, top_k]: `ids` without residents
  uint16_t* resident_slots = nullptr;        // [rows, top_k], kNoExpert elsewhere; null: not wanted
  uint8_t* deferred = nullptr;               // [rows, top_k], 0 or 1; null: not wanted
  PickSums* sums = nullptr;                  // [rows]
};

// The two ends of one layer's routed experts on the CPU side. Wait ADDS the experts' sum to `out`.
struct ExpertSubmitArgs {
  Rows rows;
  ExpertLink* link = nullptr;
  int lane = 0;
  int layer = 0;
  ConstMatrix x;  // [rows, hidden], ld == hidden
  const uint16_t* ids = nullptr;
  const float* weights = nullptr;
  const uint8_t* deferred = nullptr;  // [rows, top_k] of SplitPicks; null: nothing is
};
struct ExpertWaitArgs {
  Rows rows;
  ExpertLink* link = nullptr;
  int lane = 0;
  int layer = 0;
  Matrix out;
};

// ADDS to `out` the weighted sum of each row's experts that lie on the device. Picks without a slot
// cost nothing. A row's experts are summed in the order of its picks, then added at once.
struct ResidentExpertsArgs {
  Rows rows;
  ResidentExperts* experts = nullptr;
  int layer = 0;                    // of the model
  ConstMatrix x;                    // [rows, hidden]
  const uint16_t* slots = nullptr;  // [rows, top_k] of SplitPicks
  const float* weights = nullptr;   // [rows, top_k]
  Matrix out;
};

// Copies experts of one layer into the slots from `first_slot` on, on the copy stream. Never in a
// graph: what is copied is the host's choice of the step. A source that cannot be read is an error
// of the next Synchronize.
struct StreamExpertsArgs {
  ResidentExperts* experts = nullptr;
  ExpertWeightSource* source = nullptr;
  int layer = 0;  // of the model
  int first_slot = 0;
  const uint16_t* ids = nullptr;  // host [count]; read before the call returns
  int count = 0;
  int64_t* begin_ns = nullptr;  // the device's time before and after the copies
  int64_t* end_ns = nullptr;
};

struct GatherRowsArgs {
  Rows rows;  // of the output
  ConstMatrix x;
  const int32_t* indices = nullptr;  // [rows]: source rows
  Matrix out;
  int64_t width = 0;
};

// Per sampled row; device memory, in the order of the logits' rows.
struct SampleParams {
  float temperature = 0;  // 0: greedy
  int32_t top_k = 0;
  float top_p = 1;
  float min_p = 0;
  float presence_penalty = 0;
  float frequency_penalty = 0;
  float repetition_penalty = 1;
  uint64_t seed = 0;
  int64_t position = 0;    // keys the random draw, with the seed
  int32_t bias_begin = 0;  // logit_bias entries [bias_begin, bias_end) of SampleArgs
  int32_t bias_end = 0;
  int32_t counts_row = -1;         // row of SampleArgs::token_counts, or -1: no penalties
  const uint32_t* mask = nullptr;  // one bit a token, or null
  int32_t banned_begin = 0;        // tokens masked out (stop ids before min_tokens)
  int32_t banned_end = 0;
};

// Adjusts logits (bias, bans, mask, penalties), draws one token a row. logprobs are of the adjusted
// logits before temperature and truncation.
struct SampleArgs {
  Rows rows;
  Matrix logits;  // [rows, vocab]; changed in place
  int64_t vocab = 0;
  const SampleParams* params = nullptr;  // [rows]
  const int32_t* bias_ids = nullptr;
  const float* bias_values = nullptr;
  const int32_t* banned_ids = nullptr;
  // [counts_rows, vocab]: low 24 bits output count, high bit of 32: token is in the prompt.
  const uint32_t* token_counts = nullptr;
  int32_t* tokens = nullptr;  // [rows]; -1 where the logits are not finite
};

// Log-softmax at `targets` and the `top` largest entries of each row (ties to the lowest id).
struct LogprobsArgs {
  Rows rows;
  ConstMatrix logits;  // [rows, vocab]
  int64_t vocab = 0;
  const int32_t* targets = nullptr;  // [rows]; -1: skip the row
  const int32_t* top = nullptr;      // [rows]: entries wanted, at most max_top
  int max_top = 0;
  float* target_logprobs = nullptr;  // [rows]
  int32_t* target_ranks = nullptr;   // [rows]; 1 is the most likely
  int32_t* top_ids = nullptr;        // [rows, max_top]
  float* top_logprobs = nullptr;     // [rows, max_top]
};

// What a decode step's ops depend on: steps of one key enqueue the same ops.
struct GraphKey {
  int bucket = 0;         // rows of the first lane, at most
  int second_bucket = 0;  // of the second; 0: there is one lane
  bool measured = false;  // with the stamps that the planner reads
  bool traced = false;    // and with those that the timeline shows besides

  bool operator==(const GraphKey&) const = default;
};

// Runs of the same length at the same distance in both memories: one transfer, not `count`.
struct RunsToHostArgs {
  void* host = nullptr;
  const void* device = nullptr;
  size_t run_bytes = 0;
  size_t stride_bytes = 0;  // from one run to the next
  size_t count = 0;
};

struct BlockCopyArgs {
  PagedCache cache;
  int block_tokens = 0;
  int count = 0;
  const int32_t* source = nullptr;  // device [count]
  const int32_t* target = nullptr;
};

class Backend {
 public:
  virtual ~Backend() = default;

  // Start-up only. Memory is zeroed, 64-byte aligned and freed with the backend.
  virtual absl::StatusOr<void*> Allocate(size_t bytes) = 0;
  virtual absl::StatusOr<std::unique_ptr<LinearWeight>> LoadLinear(const MatrixSource& source) = 0;
  // Slots for routed experts. RESOURCE_EXHAUSTED when the device has no memory for them.
  virtual absl::StatusOr<std::unique_ptr<ResidentExperts>> MakeResidentExperts(
      const ResidentShape& shape) = 0;

  // Marks the ops of one decode step; a CUDA backend captures or replays them.
  virtual void GraphBegin(const GraphKey& key) = 0;
  virtual void GraphEnd() = 0;
  // Waits for everything enqueued; returns the first failure since the last call.
  virtual absl::Status Synchronize() = 0;

  virtual void CopyToDevice(void* device, const void* host, size_t bytes) = 0;
  virtual void CopyToHost(void* host, const void* device, size_t bytes) = 0;
  virtual void CopyRunsToHost(const RunsToHostArgs& args) = 0;
  virtual void RecordEvent(Stream stream, int event) = 0;
  virtual void WaitEvent(Stream stream, int event) = 0;
  // Writes the device's time, in ns from an origin of its own, when all ops before it are done.
  virtual void Stamp(int64_t* device_ns) = 0;

  virtual void Embed(const EmbedArgs& args) = 0;
  virtual void RmsNorm(const RmsNormArgs& args) = 0;
  virtual void Linear(const LinearArgs& args) = 0;
  virtual void HeadLinear(const HeadLinearArgs& args) = 0;
  virtual void RopeAngles(const RopeAnglesArgs& args) = 0;
  virtual void Rope(const RopeArgs& args) = 0;
  virtual void CacheWrite(const CacheWriteArgs& args) = 0;
  virtual void Attention(const AttentionArgs& args) = 0;
  virtual void LatentAttention(const LatentAttentionArgs& args) = 0;
  virtual void SiluMul(const SiluMulArgs& args) = 0;
  virtual void Add(const AddArgs& args) = 0;
  virtual void Router(const RouterArgs& args) = 0;
  virtual void SplitPicks(const SplitPicksArgs& args) = 0;
  virtual void ExpertSubmit(const ExpertSubmitArgs& args) = 0;
  virtual void ExpertWait(const ExpertWaitArgs& args) = 0;
  virtual void StreamExperts(const StreamExpertsArgs& args) = 0;
  virtual void RunResidentExperts(const ResidentExpertsArgs& args) = 0;
  virtual void GatherRows(const GatherRowsArgs& args) = 0;
  virtual void Sample(const SampleArgs& args) = 0;
  virtual void Logprobs(const LogprobsArgs& args) = 0;
  virtual void CopyBlocks(const BlockCopyArgs& args) = 0;
};

}  // namespace tandem::gpu
