#include "gpu_worker/links/inprocess_expert_link.h"

#include <atomic>
#include <utility>
#include <vector>

#include "common/base/check.h"
#include "common/base/status.h"
#include "common/shm/layout.h"
#include "common/shm/slot_check.h"
#include "common/shm/team_barrier.h"
#include "gpu_worker/links/link_errors.h"
#include "gpu_worker/links/row_copy.h"

namespace tandem::gpu {
namespace {

class InProcessExpertLink final : public ExpertLink {
 public:
  InProcessExpertLink(const InProcessLinkOptions& options, shm::BatchHandler* handler);

  const shm::BatchLimits& limits() const override { return limits_; }
  bool overlaps() const override { return false; }
  int threads() const override { return threads_; }
  void BeginStep(uint64_t step) override;
  void Submit(const Submission& submission, int thread, int threads) override;
  void Wait(const Collection& collection, int thread, int threads) override;
  absl::Status EndStep() override { return errors_.ToStatus(); }
  LinkError error() const override { return errors_.error(); }
  bool broken() const override { return errors_.broken(); }
  LayerTimes layer_times(uint32_t lane, uint32_t layer) const override {
    return times_[size_t{lane} * limits_.num_layers + layer];
  }

 private:
  // What a slot is to the shared-memory link: one a lane, since a lane has at most one submission
  // outstanding.
  struct Lane {
    std::vector<uint16_t> rows_bf16;
    std::vector<uint16_t> ids;
    std::vector<float> weights;
    std::vector<uint8_t> deferred;
    std::vector<float> results;
    std::atomic<uint64_t> bad_sequence{0};  // of the last submission with an id out of range
    bool computed = false;                  // written by thread 0 before a barrier
  };

  // All threads count the same submissions.
  struct alignas(shm::kLineBytes) PerThread {
    uint64_t sequence = 0;
  };

  bool CopyShare(const Submission& submission, uint32_t rows, int thread, Lane* lane);
  shm::ExpertBatch MakeBatch(const Submission& submission, uint32_t rows, Lane* lane) const;

  const shm::BatchLimits limits_;
  const int threads_;
  const shm::SpinPolicy policy_;
  shm::BatchHandler* const handler_;
  shm::TeamBarrier barrier_;
  std::vector<Lane> lanes_;
  std::vector<PerThread> per_thread_;
  std::vector<LayerTimes> times_;  // [lanes, num_layers], written by thread 0
  std::atomic<uint64_t> step_{0};
  LinkErrors errors_;
};

InProcessExpertLink::InProcessExpertLink(const InProcessLinkOptions& options,
                                         shm::BatchHandler* handler)
    : limits_(options.limits),
      threads_(options.threads),
      policy_{.spin_ns = options.spin.count() * 1000, .yield = true},
      handler_(handler),
      barrier_(options.threads),
      lanes_(options.limits.lanes),
      per_thread_(static_cast<size_t>(options.threads)),
      times_(size_t{limits_.lanes} * limits_.num_layers) {
  const size_t elements = size_t{limits_.max_rows} * limits_.hidden;
  const size_t picks = size_t{limits_.max_rows} * limits_.top_k;
  for (Lane& lane : lanes_) {
    // F32 rows are handed to the handler where they are.
    if (limits_.row_type == shm::RowType::kBf16) lane.rows_bf16.resize(elements);
    lane.ids.resize(picks);
    lane.weights.resize(picks);
    lane.deferred.resize(picks);
    lane.results.resize(elements);
  }
}

void InProcessExpertLink::BeginStep(uint64_t step) {
  errors_.ClearStep();
  step_.store(step, std::memory_order_release);
}

bool InProcessExpertLink::CopyShare(const Submission& submission, uint32_t rows, int thread,
                                    Lane* lane) {
  if (limits_.row_type == shm::RowType::kBf16) {
    PutRows(limits_.row_type, submission.x,
            ShareOf(uint64_t{rows} * limits_.hidden, thread, threads_, kElementQuantum),
            lane->rows_bf16.data());
  }
  const Span picks = ShareOf(uint64_t{rows} * limits_.top_k, thread, threads_, kElementQuantum);
  return shm::CopyPicks(submission.ids, submission.weights, submission.deferred, picks.begin,
                        picks.end, limits_.num_experts,
                        {lane->ids.data(), lane->weights.data(), lane->deferred.data()});
}

shm::ExpertBatch InProcessExpertLink::MakeBatch(const Submission& submission, uint32_t rows,
                                                Lane* lane) const {
  shm::ExpertBatch batch;
  batch.step = step_.load(std::memory_order_relaxed);
  batch.epoch = 1;
  batch.lane = submission.lane;
  batch.layer = submission.layer;
  batch.rows = rows;
  batch.top_k = limits_.top_k;
  batch.hidden = limits_.hidden;
  batch.row_type = limits_.row_type;
  batch.flags = submission.flags;
  batch.x = submission.x;
  if (limits_.row_type == shm::RowType::kBf16) batch.x = lane->rows_bf16.data();
  batch.ids = lane->ids.data();
  batch.weights = lane->weights.data();
  batch.deferred = submission.deferred != nullptr ? lane->deferred.data() : nullptr;
  batch.out = lane->results.data();
  return batch;
}

void InProcessExpertLink::Submit(const Submission& submission, int thread, int threads) {
  TANDEM_DCHECK(threads == threads_ && submission.lane < limits_.lanes);
  static_cast<void>(threads);
  Lane& lane = lanes_[submission.lane];
  const uint64_t sequence = ++per_thread_[static_cast<size_t>(thread)].sequence;
  const uint32_t rows = BoundRows(submission.rows, submission.max_rows, &errors_);
  if (!CopyShare(submission, rows, thread, &lane)) {
    lane.bad_sequence.store(sequence, std::memory_order_relaxed);
  }
  barrier_.Wait(policy_);
  const bool layer_known = submission.layer < limits_.num_layers;
  const bool run = layer_known && lane.bad_sequence.load(std::memory_order_relaxed) != sequence;
  const shm::ExpertBatch batch = MakeBatch(submission, rows, &lane);
  LayerTimes times{.begin_ns = shm::NowNs()};
  if (run) handler_->Run(batch, thread, threads_);
  if (thread == 0) {
    lane.computed = run;
    if (!run) {
      errors_.SetRefused(layer_known ? shm::RefuseCode::kExpert : shm::RefuseCode::kShape);
    }
  }
  barrier_.Wait(policy_);
  times.reply_ns = times.end_ns = shm::NowNs();
  if (run && batch.deferred != nullptr) {
    handler_->RunDeferred(batch, thread, threads_);
    // The lane's buffers are refilled by its next submission.
    barrier_.Wait(policy_);
    times.end_ns = shm::NowNs();
  }
  if (thread == 0 && run) {
    times_[size_t{submission.lane} * limits_.num_layers + submission.layer] = times;
  }
}

void InProcessExpertLink::Wait(const Collection& collection, int thread, int threads) {
  TANDEM_DCHECK(threads == threads_ && collection.lane < limits_.lanes);
  static_cast<void>(threads);
  const Lane& lane = lanes_[collection.lane];
  const uint32_t rows = BoundRows(collection.rows, collection.max_rows, &errors_);
  const Span share = ShareOf(uint64_t{rows} * limits_.hidden, thread, threads_, kElementQuantum);
  const bool store = collection.gather == Gather::kStore;
  if (lane.computed) {
    store ? StoreRows(lane.results.data(), share, collection.out)
          : AddRows(lane.results.data(), share, collection.out);
  } else if (store) {
    ZeroRows(share, collection.out);
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<ExpertLink>> MakeInProcessExpertLink(
    const InProcessLinkOptions& options, shm::BatchHandler* handler) {
  RETURN_IF_ERROR(shm::ComputeLayout(options.limits, shm::SlotsFor(options.limits.lanes)).status());
  if (options.threads < 1) return absl::InvalidArgumentError("link: no threads");
  RETURN_IF_ERROR(handler->Configure(options.limits));
  return std::make_unique<InProcessExpertLink>(options, handler);
}

}  // namespace tandem::gpu
