// A BatchHandler with a formula instead of weights, and the same formula as a plain function: what
// a link must bring back, bit by bit. Knows deferral (the carry of a lane), so that a link that
// mixes up steps, lanes or layers shows.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <vector>

#include "common/shm/expert_batch.h"

namespace tandem::testing {

// The rows of one submission, as the gpu worker has them.
struct LinkInput {
  uint32_t lane = 0;
  uint32_t layer = 0;
  int32_t rows = 0;
  std::vector<float> x;
  std::vector<uint16_t> ids;
  std::vector<float> weights;
  std::vector<uint8_t> deferred;  // empty: none
};

// Expert `id` of worker `worker` maps a row element x to x * (id + 1) + layer - worker, all in
// float.
class FakeExperts final : public shm::BatchHandler {
 public:
  explicit FakeExperts(int worker = 0) : worker_(worker) {}

  absl::Status Configure(const shm::BatchLimits& limits) override;
  void Run(const shm::ExpertBatch& batch, int thread, int threads) override;
  void RunDeferred(const shm::ExpertBatch& batch, int thread, int threads) override;

  // Every thread sleeps up to that long in every batch, a different time each.
  void set_max_delay_us(int us) { max_delay_us_.store(us); }
  // Run blocks from the next batch on, without ticks, until cleared.
  void set_hang(bool hang) { hang_.store(hang); }
  // Where this process is killed by its own hand: when the last thread has come that far.
  enum class Phase : uint8_t { kNever, kTakenUp, kComputed, kDeferred };
  struct Death {
    Phase phase = Phase::kNever;
    uint64_t step = 0;
    uint32_t lane = 0;
    uint32_t layer = 0;
  };
  // Before the step starts.
  void set_death(const Death& death) { death_ = death; }
  uint64_t runs() const { return runs_.load(); }

 private:
  // The deferred picks' sums of one lane, good for its next layer of the same step.
  struct Carry {
    std::vector<float> sums;
    uint64_t step = 0;
    uint64_t epoch = 0;
    uint32_t next_layer = 0;
    bool any = false;
  };
  void Delay(const shm::ExpertBatch& batch, int thread) const;
  void DieIf(Phase phase, const shm::ExpertBatch& batch, int threads);

  const int worker_;
  shm::BatchLimits limits_;
  std::vector<Carry> carries_;  // by lane
  std::atomic<int> max_delay_us_{0};
  std::atomic<bool> hang_{false};
  std::atomic<uint64_t> runs_{0};
  Death death_;
  std::atomic<int> arrived_{0};  // threads at the place of death
};

// The same by a plain loop, with the carries of the lanes of one worker. Start a step with a new
// object.
class ExpectedSums {
 public:
  ExpectedSums(const shm::BatchLimits& limits, int worker) : limits_(limits), worker_(worker) {}
  // [rows, hidden]
  std::vector<float> Next(const LinkInput& input);

 private:
  const shm::BatchLimits limits_;
  const int worker_;
  std::map<uint32_t, std::vector<float>> carry_;
};

// x as the handler sees it.
float OnTheLink(shm::RowType type, float value);

}  // namespace tandem::testing
