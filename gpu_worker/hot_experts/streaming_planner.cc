#include "gpu_worker/hot_experts/streaming_planner.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace tandem::gpu {
namespace {

constexpr double kShareOfSample = 0.25;
// Steps with the model's best k before it is searched around.
constexpr int kAgreedSteps = 2;
// What was found is given up when so many steps in a row differ by so much.
constexpr int kOffSteps = 4;
constexpr double kMuch = 0.125;
constexpr int kSamplesToCompare = 3;
constexpr int kTryDivisor = 8;  // of the experts, in the first step that streams

}  // namespace

void StreamingPlanner::Average::Add(double sample) {
  value = known ? value + kShareOfSample * (sample - value) : sample;
  known = true;
}

int StreamingPlanner::BucketOf(int rows) {
  const auto width = std::bit_width(static_cast<unsigned>(std::max(rows, 1)));
  return std::min(static_cast<int>(width) - 1, kBuckets - 1);
}

const StreamingPlanner::Bucket* StreamingPlanner::Nearest(int bucket,
                                                          Average Bucket::*average) const {
  for (int distance = 0; distance < kBuckets; ++distance) {
    for (const int at : {bucket - distance, bucket + distance}) {
      if (at < 0 || at >= kBuckets) continue;
      if ((buckets_[static_cast<size_t>(at)].*average).known) {
        return &buckets_[static_cast<size_t>(at)];
      }
    }
  }
  return nullptr;
}

double StreamingPlanner::Estimate(int bucket, Average Bucket::*average) const {
  const Bucket* const nearest = Nearest(bucket, average);
  if (nearest == nullptr) return 0;
  const auto distance = bucket - static_cast<int>(nearest - buckets_.data());
  return (nearest->*average).value * std::exp2(distance);
}

double StreamingPlanner::LayerNsOf(int bucket, int streamed) const {
  const double k = streamed;
  const double device = Estimate(bucket, &Bucket::shared) + k * Estimate(bucket, &Bucket::device);
  const double workers = (options_.experts - k) * Estimate(bucket, &Bucket::experts);
  const double before = Estimate(bucket, &Bucket::before);
  const double computing = buckets_[static_cast<size_t>(bucket)].overlaps
                               ? std::max(before + device, workers)
                               : before + std::max(device, workers);
  return std::max(k * copy_.value, computing);
}

double StreamingPlanner::LayerNs(int rows, int streamed) const {
  const int bucket = BucketOf(rows);
  const bool known = Nearest(bucket, &Bucket::experts) != nullptr &&
                     (streamed == 0 || (copy_.known && Nearest(bucket, &Bucket::device)));
  return known ? LayerNsOf(bucket, streamed) : 0;
}

int StreamingPlanner::Best(int bucket) const {
  const int most = std::min(options_.max_streamed, options_.experts);
  int best = 0;
  for (int k = 1; k <= most; ++k) {
    if (LayerNsOf(bucket, k) < LayerNsOf(bucket, best)) best = k;
  }
  return best;
}

int StreamingPlanner::Choose(int rows) {
  if (options_.max_streamed <= 0 || rows < options_.min_rows) return 0;
  if (options_.fixed >= 0) return std::min(options_.fixed, options_.max_streamed);
  const int at = BucketOf(rows);
  Bucket& bucket = buckets_[static_cast<size_t>(at)];
  if (!bucket.experts.known) return 0;
  if (bucket.hold > 0) {
    --bucket.hold;
    return 0;
  }
  const int most = std::min(options_.max_streamed, options_.experts);
  if (!copy_.known) return std::clamp(options_.experts / kTryDivisor, 1, most);
  if (!bucket.device.known) {
    // Another number of rows has streamed: it tells whether this one is worth a try.
    return Best(at) == 0 ? 0 : std::clamp(options_.experts / kTryDivisor, 1, most);
  }
  if (bucket.agreed < kAgreedSteps) {
    const int best = Best(at);
    const double gain = LayerNsOf(at, bucket.chosen) / LayerNsOf(at, best) - 1;
    bucket.agreed = gain > options_.min_gain ? 0 : bucket.agreed + 1;
    if (gain > options_.min_gain) bucket.chosen = best;
    if (bucket.agreed == kAgreedSteps && bucket.chosen > 0) {
      bucket.search.Start(bucket.chosen, most);
    }
    return bucket.chosen;
  }
  if (bucket.chosen > 0) bucket.chosen = bucket.search.k();
  return bucket.chosen;
}

// The search's trials, and afterwards whether what it found still holds.
void StreamingPlanner::Watch(const StreamingTimes& times, Bucket& bucket) {
  const double row_ns = times.step_ns / times.rows;
  if (times.streamed == 0 && bucket.chosen == 0) {
    // The model said that nothing is to be gained; it is asked again now and then.
    if (bucket.agreed >= kAgreedSteps && ++bucket.off >= kHoldSteps) bucket.agreed = bucket.off = 0;
    return;
  }
  if (bucket.agreed < kAgreedSteps || times.streamed != bucket.search.k()) return;
  if (bucket.search.active()) {
    bucket.search.Add(row_ns);
    bucket.off = 0;
    return;
  }
  const double ratio = row_ns / bucket.search.best_ns();
  const bool off = ratio > 1 + kMuch || ratio < 1 - kMuch;
  bucket.off = off ? bucket.off + 1 : 0;
  if (bucket.off < kOffSteps) return;
  bucket.agreed = bucket.off = 0;
}

// Promise and fulfilment.
void StreamingPlanner::Compare(const StreamingTimes& times, Bucket& bucket) const {
  const double row_ns = times.step_ns / times.rows;
  if (times.streamed == 0) {
    bucket.step_without.Add(row_ns);
    return;
  }
  // What the model tried before it agreed says nothing of what is found.
  if (bucket.agreed < kAgreedSteps || !bucket.step_without.known) return;
  const double without_ns = bucket.step_without.value;
  if (bucket.search.active()) {
    if (bucket.search.best_ns() <= without_ns * (1 + kMuch)) return;
    // The model promised far too much: a quarter may do, where there is one.
    const int fewer = bucket.search.k() / 4;
    if (fewer == 0) {
      GiveUp(bucket);
    } else {
      bucket.search.Start(fewer, std::min(options_.max_streamed, options_.experts));
    }
    return;
  }
  bucket.step_with.Add(row_ns);
  if (++bucket.samples_with < kSamplesToCompare) return;
  if (bucket.step_with.value >= without_ns * (1 - options_.min_gain / 2)) GiveUp(bucket);
}

void StreamingPlanner::GiveUp(Bucket& bucket) {
  bucket.hold = kHoldSteps;
  bucket.chosen = 0;
  bucket.samples_with = 0;
  bucket.step_with = {};
  bucket.agreed = 0;
  bucket.search.Stop();
}

void StreamingPlanner::Observe(const StreamingTimes& times) {
  if (times.rows < options_.min_rows) return;
  Bucket& bucket = buckets_[static_cast<size_t>(BucketOf(times.rows))];
  Compare(times, bucket);
  Watch(times, bucket);
  bucket.overlaps = times.overlaps;
  bucket.before.Add(times.before_ns);
  const int left = options_.experts - times.streamed;
  if (left > 0) bucket.experts.Add(times.experts_ns / left);
  if (times.streamed == 0) {
    bucket.shared.Add(times.device_ns);
    return;
  }
  copy_.Add(times.copy_ns / times.streamed);
  bucket.device.Add(std::max(0.0, times.device_ns - bucket.shared.value) / times.streamed);
}

int StreamingPlanner::threshold_rows() const {
  for (int bucket = 0; bucket < kBuckets; ++bucket) {
    if (buckets_[static_cast<size_t>(bucket)].chosen > 0) return 1 << bucket;
  }
  return 0;
}

}  // namespace tandem::gpu
