#include "tests/gpu_worker/links/fake_experts.h"

#include <signal.h>
#include <unistd.h>

#include <bit>
#include <chrono>
#include <cmath>
#include <cstring>
#include <thread>

namespace tandem::testing {
namespace {

float FromBf16(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

// By definition instead of by bit tricks: the neighbour that is nearer, the even one of a tie.
uint16_t NearestBf16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const auto below = static_cast<uint16_t>(bits >> 16);
  if (std::isnan(value)) return static_cast<uint16_t>(below | 0x40);
  const uint32_t rest = bits & 0xFFFF;
  if (rest < 0x8000) return below;
  if (rest > 0x8000) return static_cast<uint16_t>(below + 1);
  return static_cast<uint16_t>(below + (below & 1));
}

struct Pick {
  const uint16_t* ids;
  const float* weights;
  const uint8_t* deferred;
};

// One element's sum over the immediate or the deferred picks of its row, in rank order.
float ElementSum(float x, const Pick& picks, uint32_t top_k, uint32_t layer, int worker,
                 bool deferred) {
  float sum = 0.0f;
  for (uint32_t k = 0; k < top_k; ++k) {
    if (picks.ids[k] == shm::kNoExpert) continue;
    if ((picks.deferred != nullptr && picks.deferred[k] != 0) != deferred) continue;
    const float expert = x * static_cast<float>(picks.ids[k] + 1) + static_cast<float>(layer) -
                         static_cast<float>(worker);
    sum += picks.weights[k] * expert;
  }
  return sum;
}

float Element(const shm::ExpertBatch& batch, uint64_t index) {
  if (batch.row_type == shm::RowType::kF32) return static_cast<const float*>(batch.x)[index];
  return FromBf16(static_cast<const uint16_t*>(batch.x)[index]);
}

Pick PickOf(const shm::ExpertBatch& batch, uint64_t row) {
  const uint64_t at = row * batch.top_k;
  return {batch.ids + at, batch.weights + at,
          batch.deferred == nullptr ? nullptr : batch.deferred + at};
}

}  // namespace

float OnTheLink(shm::RowType type, float value) {
  return type == shm::RowType::kF32 ? value : FromBf16(NearestBf16(value));
}

absl::Status FakeExperts::Configure(const shm::BatchLimits& limits) {
  carries_.assign(limits.lanes, Carry());
  for (Carry& carry : carries_) carry.sums.resize(size_t{limits.max_rows} * limits.hidden);
  return absl::OkStatus();
}

void FakeExperts::Delay(const shm::ExpertBatch& batch, int thread) const {
  while (hang_.load()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  const int max_us = max_delay_us_.load();
  if (max_us == 0) return;
  const uint64_t mixed =
      (batch.step * 31 + batch.layer * 7 + static_cast<uint64_t>(thread)) * 0x9E3779B97F4A7C15ull;
  std::this_thread::sleep_for(
      std::chrono::microseconds((mixed >> 33) % static_cast<uint64_t>(max_us)));
}

void FakeExperts::DieIf(Phase phase, const shm::ExpertBatch& batch, int threads) {
  if (phase != death_.phase || batch.step != death_.step || batch.lane != death_.lane ||
      batch.layer != death_.layer) {
    return;
  }
  if (arrived_.fetch_add(1) + 1 == threads) kill(getpid(), SIGKILL);
}

void FakeExperts::Run(const shm::ExpertBatch& batch, int thread, int threads) {
  DieIf(Phase::kTakenUp, batch, threads);
  Delay(batch, thread);
  if (thread == 0) runs_.fetch_add(1);
  const Carry& carry = carries_[batch.lane];
  const bool add = carry.any && carry.step == batch.step && carry.epoch == batch.epoch &&
                   carry.next_layer == batch.layer;
  const uint64_t elements = uint64_t{batch.rows} * batch.hidden;
  const uint64_t begin = elements * static_cast<uint64_t>(thread) / static_cast<uint64_t>(threads);
  const uint64_t end =
      elements * (static_cast<uint64_t>(thread) + 1) / static_cast<uint64_t>(threads);
  for (uint64_t i = begin; i < end; ++i) {
    const float sum = ElementSum(Element(batch, i), PickOf(batch, i / batch.hidden), batch.top_k,
                                 batch.layer, worker_, false);
    batch.out[i] = add ? sum + carry.sums[i] : sum;
  }
  Tick(batch);
  DieIf(Phase::kComputed, batch, threads);
}

void FakeExperts::RunDeferred(const shm::ExpertBatch& batch, int thread, int threads) {
  DieIf(Phase::kDeferred, batch, threads);
  Delay(batch, thread);
  Carry& carry = carries_[batch.lane];
  const uint64_t elements = uint64_t{batch.rows} * batch.hidden;
  for (auto i = static_cast<uint64_t>(thread); i < elements; i += static_cast<uint64_t>(threads)) {
    carry.sums[i] = ElementSum(Element(batch, i), PickOf(batch, i / batch.hidden), batch.top_k,
                               batch.layer, worker_, true);
  }
  if (thread != 0) return;
  carry.step = batch.step;
  carry.epoch = batch.epoch;
  carry.next_layer = batch.layer + 1;
  carry.any = true;
}

std::vector<float> ExpectedSums::Next(const LinkInput& input) {
  std::vector<float> sums(static_cast<size_t>(input.rows) * limits_.hidden);
  std::vector<float> carry(sums.size());
  const auto before = carry_.find(input.lane);
  for (size_t i = 0; i < sums.size(); ++i) {
    const size_t at = i / limits_.hidden * limits_.top_k;
    const Pick picks{input.ids.data() + at, input.weights.data() + at,
                     input.deferred.empty() ? nullptr : input.deferred.data() + at};
    const float x = OnTheLink(limits_.row_type, input.x[i]);
    sums[i] = ElementSum(x, picks, limits_.top_k, input.layer, worker_, false);
    carry[i] = ElementSum(x, picks, limits_.top_k, input.layer, worker_, true);
    if (before != carry_.end()) sums[i] += before->second[i];
  }
  if (input.deferred.empty()) {
    carry_.erase(input.lane);
  } else {
    carry_[input.lane] = carry;
  }
  return sums;
}

}  // namespace tandem::testing
