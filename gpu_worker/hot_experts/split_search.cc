#include "gpu_worker/hot_experts/split_search.h"

#include <algorithm>

namespace tandem::gpu {
namespace {

// Of the experts: the stride at first, and the last one tried.
constexpr int kFirstStride = 8;
constexpr int kLastStride = 64;
// A shorter step by less may be noise.
constexpr double kLeastGain = 0.01;

}  // namespace

void SplitSearch::Start(int guess, int most) {
  *this = {};
  active_ = true;
  most_ = most;
  best_ = k_ = guess;
  stride_ = std::max(1, most / kFirstStride);
}

void SplitSearch::Add(double row_ns) {
  if (!active_) return;
  if (steps_++ > 0) sum_ns_ += row_ns;
  if (steps_ < kTrialSteps) return;
  const double mean_ns = sum_ns_ / (kTrialSteps - 1);
  steps_ = 0;
  sum_ns_ = 0;
  Judge(mean_ns);
}

void SplitSearch::Judge(double mean_ns) {
  if (best_ns_ == 0) {
    best_ns_ = mean_ns;  // of the guess
  } else if (mean_ns < best_ns_ * (1 - kLeastGain)) {
    best_ = k_;
    best_ns_ = mean_ns;
    moved_ = true;
    k_ = best_ + direction_ * stride_;
    if (k_ >= 1 && k_ <= most_) return;
    Next();
    return;
  }
  Next();
}

// After a trial in vain: the other direction, unless this one has led here; then a shorter stride.
void SplitSearch::Next() {
  while (true) {
    if (direction_ < 0 && !moved_ && k_ != best_) {
      direction_ = 1;
    } else if (k_ != best_) {
      direction_ = -1;
      moved_ = false;
      stride_ /= 2;
      if (stride_ == 0 || stride_ < most_ / kLastStride) break;
    }
    k_ = best_ + direction_ * stride_;
    if (k_ >= 1 && k_ <= most_) return;
  }
  active_ = false;
  k_ = best_;
}

}  // namespace tandem::gpu
