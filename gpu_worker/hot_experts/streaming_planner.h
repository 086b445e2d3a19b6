#pragma once

// How many of a layer's experts a prefill step streams to the device. A layer with k streamed ones
// takes
//
//   max(k * copy, before + max(shared + k * device, (E - k) * workers))     with one lane
//   max(k * copy, before + shared + k * device, (E - k) * workers)          with two
//
// where `copy` runs under the layer before, `before` is attention and router, and E are the experts
// that are not resident. Copies take the same time for any rows; the rest is measured apart for
// each power of two of rows, and taken from the nearest measured one where there is none. The best
// k is 0 for few rows: then an expert's copy takes longer than computing it where it lies. That is
// the threshold, which nobody has to set.
//
// What was never measured is tried: a first step with no streaming, then one with an eighth of the
// experts. Once the model's best k stays within `min_gain`, measured steps around it decide
// (split_search.h); what they found is kept until steps take an eighth more or less. Where
// steps that stream turn out no faster a row than those before, whatever was promised, nothing is
// streamed for kHoldSteps steps of that size.
//
// Pure logic. Thread safety: none. Times in ns, means over a step's layers.

#include <array>
#include <cstdint>

#include "gpu_worker/hot_experts/split_search.h"

namespace tandem::gpu {

// One prefill step, a layer on average.
struct StreamingTimes {
  int rows = 0;
  double step_ns = 0;     // of the whole step
  int streamed = 0;       // experts a layer, k
  double before_ns = 0;   // from the layer's start until its rows are routed
  double device_ns = 0;   // shared, resident and streamed experts on the device
  double experts_ns = 0;  // the workers', from taking the rows up to the answer
  bool overlaps = false;  // two lanes: attention of one runs under the experts of the other
  double copy_ns = 0;     // of the streamed experts; 0 where nothing was streamed
};

class StreamingPlanner {
 public:
  struct Options {
    int experts = 0;       // of a layer that are not resident, at most
    int max_streamed = 0;  // that a layer slot holds
    int min_rows = 32;     // below that a step is left alone
    double min_gain = 0.03;
    int fixed = -1;  // always so many, for comparison; -1: as measured
  };

  static constexpr int kHoldSteps = 64;

  explicit StreamingPlanner(const Options& options) : options_(options) {}

  // Experts to stream a layer.
  int Choose(int rows);
  void Observe(const StreamingTimes& times);

  // What the planner expects of a layer; 0 where it cannot know.
  double LayerNs(int rows, int streamed) const;
  // The fewest rows of those measured that are worth streaming for; 0: none.
  int threshold_rows() const;

 private:
  static constexpr int kBuckets = 20;  // powers of two of rows

  // An average that follows changes: each measurement counts a quarter.
  struct Average {
    double value = 0;
    bool known = false;
    void Add(double sample);
  };
  struct Bucket {
    Average before;
    Average shared;   // on the device, without streamed experts
    Average device;   // an expert, on the device
    Average experts;  // an expert, on the workers
    int chosen = 0;
    bool overlaps = false;
    Average step_without;  // of a row
    Average step_with;
    int samples_with = 0;
    int hold = 0;  // steps without streaming to come
    // Around the model's best.
    SplitSearch search;
    int agreed = 0;  // steps whose k the model had no better one for
    int off = 0;     // steps in a row that took much longer or shorter than what was found
  };

  static int BucketOf(int rows);
  // The bucket nearest to `bucket` whose `average` is known, or null.
  const Bucket* Nearest(int bucket, Average Bucket::*average) const;
  // The average of `bucket`, or of the nearest by `rows` in proportion.
  double Estimate(int bucket, Average Bucket::*average) const;
  double LayerNsOf(int bucket, int streamed) const;
  int Best(int bucket) const;
  void Compare(const StreamingTimes& times, Bucket& bucket) const;
  static void GiveUp(Bucket& bucket);
  static void Watch(const StreamingTimes& times, Bucket& bucket);

  const Options options_;
  std::array<Bucket, kBuckets> buckets_{};
  Average copy_;  // an expert
};

}  // namespace tandem::gpu
