// The seam between the gpu worker's layer graph and the routed experts of one expert worker.
//
// A Backend uses a link as two ops of its stream: Submit hands rows with their picks over, Wait
// brings the partial sums back. Both are SPMD: every thread of the backend's pool calls them with
// its index, does its share of the copying and returns; how the elements are shared out is
// unspecified, so the backend puts a barrier between what wrote `x` and Submit, and between Wait
// and what reads `out`. All threads make the same calls in the same order. `rows` is a device
// scalar: it is read when the op executes, never at enqueue.
//
// Deferred picks: the worker answers with the sum of the others and of what it has carried from the
// lane's layer before, in the same step; the deferred picks' sum is its carry then.
//
// Order: at most one submission of a lane is outstanding (Submit, then Wait, with the same lane and
// layer); lanes may interleave: Submit A, Submit B, Wait A, Wait B. Every Submit is followed by its
// Wait, in a failed step too.
//
// Errors: Submit and Wait make no Status and never block without bound. The first error of a step
// sticks and EndStep reports it; what Wait stores for a failed submission is zeros. A link whose
// peer is gone (`broken()`) stays so, its calls return at once: the owner makes a new link.
//
// Ownership: the link owns its buffers and threads; pointers in a Submission must stay valid until
// the matching Wait. Implementations: gpu_worker/links/ (shared memory, in-process, and
// ExpertLinkSet, which joins several).
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "common/shm/expert_batch.h"

namespace tandem::gpu {

enum class LinkError : uint32_t {
  kNone = 0,
  kBadSubmission,  // *rows < 0 or above the bound: nothing was computed
  kRefused,  // the expert worker refused the slot (expert id or layer out of range, stale, lengths)
  kBadReply,  // the answer's header does not match the submission
  kPeerDied,  // the expert worker died or closed the link
  kTimeout,   // no progress of the expert worker for the deadline
  kAborted,   // the expert worker or the owner of this link gave the link up
};

// What a step ends with that met `error`; OK for kNone. UNAVAILABLE when the expert worker is gone
// or hung, INTERNAL when a submission or reply was refused.
absl::Status LinkStatus(LinkError error);

// One layer of one lane, handed over. Arrays are dense, row-major, [*rows, ...].
struct Submission {
  uint32_t lane = 0;
  uint32_t layer = 0;
  uint32_t flags = 0;                 // passed through to ExpertBatch::flags
  const int32_t* rows = nullptr;      // device scalar, 0 <= *rows <= max_rows
  int32_t max_rows = 0;               // host bound (the bucket); <= limits().max_rows
  const float* x = nullptr;           // [rows, hidden]
  const uint16_t* ids = nullptr;      // [rows, top_k], shm::kNoExpert = skip
  const float* weights = nullptr;     // [rows, top_k]
  const uint8_t* deferred = nullptr;  // [rows, top_k] nonzero = deferred; null = none
};

enum class Gather : uint32_t {
  kStore,  // out = partial sums
  kAdd,    // out += partial sums
};

struct Collection {
  uint32_t lane = 0;
  uint32_t layer = 0;
  const int32_t* rows = nullptr;  // the same scalar value as in the submission
  int32_t max_rows = 0;
  float* out = nullptr;  // [rows, hidden]
  Gather gather = Gather::kStore;
};

// When the expert worker was at what with one layer of one lane: CLOCK_MONOTONIC of its machine,
// ns. All zero where nothing was measured.
struct LayerTimes {
  int64_t begin_ns = 0;  // taken up
  int64_t reply_ns = 0;  // answered
  int64_t end_ns = 0;    // its deferred picks done; reply_ns without any
};

class ExpertLink {
 public:
  virtual ~ExpertLink() = default;

  virtual const shm::BatchLimits& limits() const = 0;
  // Whether the experts are computed while the backend does other work: not where both take turns
  // on the same cores.
  virtual bool overlaps() const = 0;
  // Number of threads that must call Submit and Wait.
  virtual int threads() const = 0;

  // Called by one thread before the first op of a step: clears errors that do not break the link,
  // wakes the expert worker ahead of the first layer, and from here on requires its progress.
  // `step` is unique per step.
  virtual void BeginStep(uint64_t step) = 0;

  virtual void Submit(const Submission& submission, int thread, int threads) = 0;
  // Lets go of all that this thread has submitted, where Submit held it back because both sides
  // share the cores. Wait begins with it; whoever waits for several links calls it on all first.
  virtual void Release(int thread) { static_cast<void>(thread); }
  virtual void Wait(const Collection& collection, int thread, int threads) = 0;

  // Called by one thread after the last op of the step (error or not). Errors: those of LinkStatus.
  virtual absl::Status EndStep() = 0;

  // The step's first error so far. Any thread.
  virtual LinkError error() const = 0;
  // True once the link can never work again. Any thread.
  virtual bool broken() const = 0;
  // Grows while the experts compute, where the link can tell (heartbeats of long steps). Any
  // thread.
  virtual uint64_t ticks() const { return 0; }
  // Of the step that has ended last; for its owner, between steps. Of several workers: the first
  // begin, the last reply and end.
  virtual LayerTimes layer_times(uint32_t lane, uint32_t layer) const = 0;
};

}  // namespace tandem::gpu
