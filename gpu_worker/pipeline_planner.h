#pragma once

// Chooses how each step is pipelined (gpu_worker/pipeline.h) from the measured times of the steps
// before: plain, with deferral where the operator allows it, as two ping-pong lanes, or both.
//
// Steps are compared within a class: so many rows (in powers of two), decode only or not. A class
// begins plain. From a plain step's sums follows what a policy could take at best,
//   deferral   before + max(beside, experts - what may be deferred), at least all of the experts
//   ping-pong  the busier of the two sides; from steps of half the rows where there were any
// and a policy that could gain kWorthTrying is tried: step by step in turns with the one in use,
// until their mean times differ beyond their noise. It takes over only if it gains kWorthSwitching;
// else it is left alone for some hundred steps, twice as long after every trial. The policy in use
// is put on trial against plain in the same way. So two policies that are equal never alternate,
// and a trial costs a handful of steps in hundreds.
//
// In ping-pong the rows are cut where the lanes take equal time (device and experts together).
//
// Pure logic: no clock, no I/O. Thread safety: none. Nothing is allocated after construction.

#include <array>
#include <cstdint>

#include "gpu_worker/step_times.h"

namespace tandem::gpu {

enum class StepPolicy : uint8_t { kPlain, kDeferral, kPingPong, kBoth };
inline constexpr int kPolicies = 4;

const char* StepPolicyName(StepPolicy policy);
constexpr bool Defers(StepPolicy p) { return p == StepPolicy::kDeferral || p == StepPolicy::kBoth; }
constexpr int LanesOf(StepPolicy p) {
  return p == StepPolicy::kPingPong || p == StepPolicy::kBoth ? 2 : 1;
}

struct PlannerOptions {
  enum class Mode : uint8_t { kAuto, kPlain, kDeferral, kPingPong, kBoth };
  Mode mode = Mode::kAuto;
  bool may_defer = false;      // the operator allows it
  bool defer_prefill = false;  // for prompt rows too
  bool overlaps = true;        // device and experts can work at the same time
  double deferrable = 0;       // share of a token's experts that may be deferred, for the estimate
  int measure_every = 1;       // steps; stamps cost launches on a device
};

struct StepShape {
  int rows = 0;
  int decode_rows = 0;

  bool decode() const { return rows == decode_rows; }
};

struct StepChoice {
  StepPolicy policy = StepPolicy::kPlain;
  int first_lane_rows = 0;  // of two lanes
  bool measured = false;
};

class PipelinePlanner {
 public:
  explicit PipelinePlanner(const PlannerOptions& options) : options_(options) {}

  StepChoice Choose(const StepShape& shape);
  // What became of the step that Choose was last asked for; not called for a failed one.
  void Observe(const StepShape& shape, const StepChoice& choice, const StepTimes& times);

  // Prompt rows beside so many decodes that let a step take `target_ns`; 0: not known yet.
  int AdvisedPrefillRows(int decode_rows, int64_t target_ns) const;

  // A change of policy since the last call, for the log.
  struct Switch {
    bool happened = false;
    StepShape shape;
    StepPolicy from = StepPolicy::kPlain;
    StepPolicy to = StepPolicy::kPlain;
    int64_t from_ns = 0;  // mean time of a row's step in the trial
    int64_t to_ns = 0;
  };
  Switch TakeSwitch();

  // The policy in use for such steps.
  StepPolicy policy(const StepShape& shape) const;

 private:
  static constexpr int kClasses = 2 * 21;  // rows up to 2^20, decode or not

  // Mean and variance of step times.
  struct Samples {
    int count = 0;
    double mean = 0;
    double m2 = 0;  // sum of squared differences from the mean (Welford)

    void Add(double value);
    double error() const;  // standard error of the mean; infinite below two samples
  };
  // Moving averages of a class's plain steps, ns a step.
  struct Sides {
    bool known = false;
    double before = 0, beside = 0, experts = 0, other = 0;
    double rows = 0;
  };
  struct Class {
    StepPolicy current = StepPolicy::kPlain;
    Sides plain;
    double step_ns = 0;  // moving average, whatever the policy
    double step_rows = 0;
    bool trying = false;
    StepPolicy candidate = StepPolicy::kPlain;
    Samples current_times;
    Samples candidate_times;
    uint64_t steps = 0;
    std::array<uint64_t, kPolicies> next_trial{};  // step number
    std::array<uint64_t, kPolicies> pause{};       // steps, doubles
    double first_lane = 0.5;                       // share of the rows
  };

  static int ClassOf(const StepShape& shape);
  bool IsAllowed(StepPolicy policy, const StepShape& shape) const;
  StepPolicy Forced(const StepShape& shape) const;
  int FirstLaneRows(const Class& c, const StepShape& shape) const;
  void Learn(Class& c, const StepShape& shape, const StepChoice& choice, const StepTimes& times);
  void Balance(Class& c, const StepTimes& times) const;
  // The least time that a step of the class can take under a policy; 0 where nothing is known.
  double BestCase(int index, StepPolicy policy) const;
  void StartTrial(int index, const StepShape& shape);
  void JudgeTrial(Class& c, const StepShape& shape);
  void EndTrial(Class& c, bool adopt, const StepShape& shape);

  const PlannerOptions options_;
  std::array<Class, kClasses> classes_;
  uint64_t steps_ = 0;
  Switch switch_;
};

}  // namespace tandem::gpu
