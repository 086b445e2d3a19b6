#include "gpu_worker/pipeline_planner.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <utility>

namespace tandem::gpu {
namespace {

// Moving averages follow a change in some ten steps.
constexpr double kWeight = 0.1;
// Plain steps before anything is estimated from them.
constexpr uint64_t kPlainSteps = 8;
// A policy is tried that could gain that much, and taken if it gains this much: a trial costs a few
// steps in hundreds (below 1 %), a wrong switch every step.
constexpr double kWorthTrying = 0.04;
constexpr double kWorthSwitching = 0.03;
// Samples of each side of a trial: from the fewest on it ends when the means differ by so many
// standard errors (one in some hundred trials errs).
constexpr int kFewestSamples = 4;
constexpr int kMostSamples = 32;
constexpr double kErrors = 2.5;
// Steps between trials of a policy, after the first and at most.
constexpr uint64_t kFirstPause = 256;
constexpr uint64_t kLongestPause = 16384;

void Mix(double sample, double& average) {
  average = average == 0 ? sample : average + kWeight * (sample - average);
}

}  // namespace

const char* StepPolicyName(StepPolicy policy) {
  switch (policy) {
    case StepPolicy::kPlain:
      return "plain";
    case StepPolicy::kDeferral:
      return "deferral";
    case StepPolicy::kPingPong:
      return "pingpong";
    case StepPolicy::kBoth:
      return "both";
  }
  return "unknown";
}

void PipelinePlanner::Samples::Add(double value) {
  ++count;
  const double delta = value - mean;
  mean += delta / count;
  m2 += delta * (value - mean);
}

double PipelinePlanner::Samples::error() const {
  if (count < 2) return std::numeric_limits<double>::infinity();
  return std::sqrt(m2 / (count - 1) / count);
}

int PipelinePlanner::ClassOf(const StepShape& shape) {
  const auto rows = static_cast<unsigned>(std::max(shape.rows, 1));
  const int size = std::min(static_cast<int>(std::bit_width(rows - 1)), kClasses / 2 - 1);
  return 2 * size + (shape.decode() ? 1 : 0);
}

bool PipelinePlanner::IsAllowed(StepPolicy policy, const StepShape& shape) const {
  if (policy == StepPolicy::kPlain) return true;
  if (!options_.overlaps) return false;
  if (LanesOf(policy) > 1 && shape.rows < 2) return false;
  return !Defers(policy) ||
         (options_.may_defer && (shape.decode_rows > 0 || options_.defer_prefill));
}

// With a fixed mode: the nearest policy that the step allows, whether or not sides overlap.
StepPolicy PipelinePlanner::Forced(const StepShape& shape) const {
  using Mode = PlannerOptions::Mode;
  const bool lanes =
      (options_.mode == Mode::kPingPong || options_.mode == Mode::kBoth) && shape.rows >= 2;
  const bool defer =
      (options_.mode == Mode::kDeferral || options_.mode == Mode::kBoth) && options_.may_defer;
  if (lanes) return defer ? StepPolicy::kBoth : StepPolicy::kPingPong;
  return defer ? StepPolicy::kDeferral : StepPolicy::kPlain;
}

int PipelinePlanner::FirstLaneRows(const Class& c, const StepShape& shape) const {
  const auto rows = static_cast<int>(std::lround(c.first_lane * shape.rows));
  return std::clamp(rows, 1, shape.rows - 1);
}

StepChoice PipelinePlanner::Choose(const StepShape& shape) {
  StepChoice choice;
  Class& c = classes_[static_cast<size_t>(ClassOf(shape))];
  choice.measured = steps_++ % static_cast<uint64_t>(options_.measure_every) == 0;
  if (options_.mode != PlannerOptions::Mode::kAuto) {
    choice.policy = Forced(shape);
  } else {
    const bool turn = c.trying && c.candidate_times.count < c.current_times.count;
    choice.policy = turn ? c.candidate : c.current;
    if (!IsAllowed(choice.policy, shape)) choice.policy = StepPolicy::kPlain;
  }
  if (LanesOf(choice.policy) > 1) choice.first_lane_rows = FirstLaneRows(c, shape);
  return choice;
}

void PipelinePlanner::Observe(const StepShape& shape, const StepChoice& choice,
                              const StepTimes& times) {
  const int index = ClassOf(shape);
  Class& c = classes_[static_cast<size_t>(index)];
  ++c.steps;
  Learn(c, shape, choice, times);
  if (LanesOf(choice.policy) > 1 && times.measured) Balance(c, times);
  if (options_.mode != PlannerOptions::Mode::kAuto) return;
  if (!c.trying) {
    StartTrial(index, shape);
    return;
  }
  // Steps of a class differ in rows: prompts are compared by the row.
  const double sample = static_cast<double>(times.step_ns) / (shape.decode() ? 1.0 : shape.rows);
  if (choice.policy == c.candidate) {
    c.candidate_times.Add(sample);
  } else if (choice.policy == c.current) {
    c.current_times.Add(sample);
  }
  JudgeTrial(c, shape);
}

void PipelinePlanner::Learn(Class& c, const StepShape& shape, const StepChoice& choice,
                            const StepTimes& times) {
  Mix(static_cast<double>(times.step_ns), c.step_ns);
  Mix(shape.rows, c.step_rows);
  if (choice.policy != StepPolicy::kPlain || !times.measured) return;
  Sides& s = c.plain;
  s.known = true;
  const auto inside =
      static_cast<double>(times.before_ns + times.beside_ns + times.device_stall_ns);
  Mix(static_cast<double>(times.before_ns), s.before);
  Mix(static_cast<double>(times.beside_ns), s.beside);
  Mix(static_cast<double>(times.experts_ns), s.experts);
  Mix(std::max(static_cast<double>(times.step_ns) - inside, 0.0), s.other);
  Mix(shape.rows, s.rows);
}

void PipelinePlanner::Balance(Class& c, const StepTimes& times) const {
  constexpr double kGain = 0.25;
  constexpr double kTolerated = 0.05;  // what noise and single rows make
  const auto total = [](const StepTimes::Lane& lane) {
    return static_cast<double>(lane.device_ns + lane.experts_ns);
  };
  const double a = total(times.lane[0]);
  const double b = total(times.lane[1]);
  if (a + b <= 0) return;
  const double excess = (b - a) / (a + b);
  if (std::fabs(excess) < kTolerated) return;
  c.first_lane = std::clamp(c.first_lane + kGain * excess, 0.2, 0.8);
}

double PipelinePlanner::BestCase(int index, StepPolicy policy) const {
  const Sides& whole = classes_[static_cast<size_t>(index)].plain;
  if (!whole.known) return 0;
  const double plain = whole.before + std::max(whole.beside, whole.experts);
  double before = whole.before, beside = whole.beside, experts = whole.experts;
  if (LanesOf(policy) > 1 && index >= 2) {
    // Two halves cost what two steps of half the rows do, never less than the whole.
    const Sides& half = classes_[static_cast<size_t>(index - 2)].plain;
    if (half.known) {
      before = std::max(before, 2 * half.before);
      beside = std::max(beside, 2 * half.beside);
      experts = std::max(experts, 2 * half.experts);
    }
  }
  double best = plain;
  switch (policy) {
    case StepPolicy::kPlain:
      break;
    case StepPolicy::kDeferral:
      best = std::max(before + std::max(beside, (1 - options_.deferrable) * experts), experts);
      break;
    case StepPolicy::kPingPong:
    case StepPolicy::kBoth:
      best = std::max(before + beside, experts);
      break;
  }
  return best + whole.other;
}

void PipelinePlanner::StartTrial(int index, const StepShape& shape) {
  Class& c = classes_[static_cast<size_t>(index)];
  if (c.steps < kPlainSteps) return;
  double best_ns = std::numeric_limits<double>::infinity();
  for (int p = 0; p < kPolicies; ++p) {
    const auto policy = static_cast<StepPolicy>(p);
    const auto i = static_cast<size_t>(p);
    if (policy == c.current || !IsAllowed(policy, shape) || c.steps < c.next_trial[i]) continue;
    const double expected = BestCase(index, policy);
    // What the policy in use takes is known; plain is tried against it whatever was estimated.
    const bool worth = policy == StepPolicy::kPlain || expected < (1 - kWorthTrying) * c.step_ns;
    if (expected <= 0 || !worth || expected >= best_ns) continue;
    best_ns = expected;
    c.trying = true;
    c.candidate = policy;
    c.current_times = c.candidate_times = {};
  }
}

void PipelinePlanner::JudgeTrial(Class& c, const StepShape& shape) {
  const Samples& now = c.current_times;
  const Samples& then = c.candidate_times;
  const int samples = std::min(now.count, then.count);
  if (samples < kFewestSamples) return;
  const double gain = (now.mean - then.mean) / now.mean;
  const double error = std::hypot(now.error(), then.error()) / now.mean;
  const bool clear = std::fabs(gain - kWorthSwitching) > kErrors * error;
  if (!clear && samples < kMostSamples) return;
  EndTrial(c, clear && gain > kWorthSwitching, shape);
}

void PipelinePlanner::EndTrial(Class& c, bool adopt, const StepShape& shape) {
  const auto pause_for = [&](StepPolicy policy, uint64_t steps) {
    const auto i = static_cast<size_t>(policy);
    c.pause[i] = steps;
    c.next_trial[i] = c.steps + steps;
  };
  c.trying = false;
  const auto tried = static_cast<size_t>(c.candidate);
  if (!adopt) {
    pause_for(c.candidate, std::clamp(2 * c.pause[tried], kFirstPause, kLongestPause));
    return;
  }
  switch_ = {.happened = true,
             .shape = shape,
             .from = c.current,
             .to = c.candidate,
             .from_ns = static_cast<int64_t>(c.current_times.mean),
             .to_ns = static_cast<int64_t>(c.candidate_times.mean)};
  pause_for(c.current, kFirstPause);
  c.current = c.candidate;
}

PipelinePlanner::Switch PipelinePlanner::TakeSwitch() { return std::exchange(switch_, {}); }

StepPolicy PipelinePlanner::policy(const StepShape& shape) const {
  if (options_.mode != PlannerOptions::Mode::kAuto) return Forced(shape);
  return classes_[static_cast<size_t>(ClassOf(shape))].current;
}

// Steps with prompt rows, by their mean rows and time, joined by straight lines; beyond the largest
// the last of them goes on to twice its rows, so that larger steps are met with care.
int PipelinePlanner::AdvisedPrefillRows(int decode_rows, int64_t target_ns) const {
  const auto target = static_cast<double>(target_ns);
  double rows = 0, ns = 0;  // the point before
  double slope = 0;         // rows a ns
  double most_rows = 0;
  for (size_t i = 0; i < classes_.size(); i += 2) {
    const Class& c = classes_[i];
    if (c.step_ns <= 0) continue;
    slope = (c.step_rows - rows) / std::max(c.step_ns - ns, 1.0);
    most_rows = 2 * c.step_rows;
    if (c.step_ns > target) break;
    rows = c.step_rows;
    ns = c.step_ns;
  }
  if (most_rows == 0) return 0;
  const double advised = std::min(rows + slope * std::max(target - ns, 0.0), most_rows);
  return std::max(static_cast<int>(advised) - decode_rows, 1);
}

}  // namespace tandem::gpu
