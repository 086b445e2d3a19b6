// The planner on a noisy simulated clock: it finds what is faster, keeps off what is not, and does
// not oscillate.

#include "gpu_worker/pipeline_planner.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>

namespace tandem::gpu {
namespace {

using Mode = PlannerOptions::Mode;

// A machine by its two sides: a step of `rows` rows takes so long on each.
struct Machine {
  double before_us = 100;      // device, of a step however many rows
  double before_row_us = 10;   // and a row
  double beside_us = 20;       // shared experts
  double experts_us = 100;     // workers, of a step
  double experts_row_us = 50;  // and a row
  double other_us = 20;        // head, sampling
  double deferrable = 0;       // share of the experts that deferral takes off the critical path
  double noise = 0;            // standard deviation of a step's time, as a share
};

struct Sides {
  double before, beside, experts;
};

Sides SidesOf(const Machine& m, double rows) {
  return {m.before_us + m.before_row_us * rows, m.beside_us,
          m.experts_us + m.experts_row_us * rows};
}

double StepUs(const Machine& m, const StepShape& shape, const StepChoice& choice) {
  const double deferred = Defers(choice.policy) ? m.deferrable : 0;
  if (LanesOf(choice.policy) == 1) {
    const Sides s = SidesOf(m, shape.rows);
    return m.other_us +
           std::max(s.before + std::max(s.beside, (1 - deferred) * s.experts), s.experts);
  }
  const Sides a = SidesOf(m, choice.first_lane_rows);
  const Sides b = SidesOf(m, shape.rows - choice.first_lane_rows);
  return m.other_us + std::max(a.before + a.beside + b.before + b.beside, a.experts + b.experts);
}

StepTimes TimesOf(const Machine& m, const StepShape& shape, const StepChoice& choice,
                  double factor) {
  StepTimes times;
  times.measured = choice.measured;
  const auto ns = [&](double us) { return static_cast<int64_t>(us * 1000 * factor); };
  times.step_ns = ns(StepUs(m, shape, choice));
  if (!times.measured) return times;
  const int lanes = LanesOf(choice.policy);
  for (int i = 0; i < lanes; ++i) {
    const int rows = lanes == 1
                         ? shape.rows
                         : (i == 0 ? choice.first_lane_rows : shape.rows - choice.first_lane_rows);
    const Sides s = SidesOf(m, rows);
    times.before_ns += ns(s.before);
    times.beside_ns += ns(s.beside);
    times.experts_ns += ns(s.experts);
    times.device_stall_ns += ns(std::max(s.experts - s.beside, 0.0));
    times.lane[static_cast<size_t>(i)] = {ns(s.before + s.beside), ns(s.experts)};
  }
  return times;
}

struct Outcome {
  double mean_us = 0;
  double plain_us = 0;  // the same steps, all plain
  int switches = 0;
  StepPolicy last = StepPolicy::kPlain;
  int last_first_lane_rows = 0;
};

Outcome Simulate(PipelinePlanner& planner, const Machine& m, const StepShape& shape, int steps,
                 uint32_t seed = 1) {
  std::mt19937 rng(seed);
  std::normal_distribution<double> noise(1.0, m.noise);
  Outcome run;
  for (int i = 0; i < steps; ++i) {
    const StepChoice choice = planner.Choose(shape);
    const double factor = std::max(noise(rng), 0.2);
    planner.Observe(shape, choice, TimesOf(m, shape, choice, factor));
    run.switches += planner.TakeSwitch().happened ? 1 : 0;
    run.mean_us += StepUs(m, shape, choice) / steps;
    run.plain_us += StepUs(m, shape, {}) / steps;
    if (LanesOf(choice.policy) > 1) run.last_first_lane_rows = choice.first_lane_rows;
  }
  run.last = planner.policy(shape);
  return run;
}

TEST(PipelinePlanner, TakesPingPongWhereItGains) {
  for (const double noise : {0.0, 0.03, 0.1}) {
    PipelinePlanner planner({});
    Machine m;
    m.before_us = 20;
    m.before_row_us = 50;
    m.noise = noise;
    const Outcome run = Simulate(planner, m, {.rows = 8, .decode_rows = 8}, 3000);
    EXPECT_EQ(run.last, StepPolicy::kPingPong) << noise;
    EXPECT_LE(run.switches, 2) << noise;
    EXPECT_LT(run.mean_us, 0.8 * run.plain_us) << noise;
  }
}

// Each half reads the attention weights again: here that costs more than the overlap brings.
TEST(PipelinePlanner, StaysPlainWhereHalvesCostMore) {
  for (const double noise : {0.0, 0.03, 0.1}) {
    PipelinePlanner planner({});
    Machine m;
    m.before_us = 400;
    m.before_row_us = 1;
    m.experts_us = 300;
    m.experts_row_us = 2;
    m.noise = noise;
    const Outcome run = Simulate(planner, m, {.rows = 4, .decode_rows = 4}, 5000);
    EXPECT_EQ(run.last, StepPolicy::kPlain) << noise;
    EXPECT_EQ(run.switches, 0) << noise;
    EXPECT_LT(run.mean_us, 1.02 * run.plain_us) << noise;
  }
}

// Equal policies: whoever goes by the last measurement alternates.
TEST(PipelinePlanner, DoesNotOscillateBetweenEquals) {
  for (uint32_t seed = 1; seed <= 20; ++seed) {
    PipelinePlanner planner({});
    Machine m;
    m.before_us = 200;  // twice, in ping-pong, is what is gained
    m.before_row_us = 0;
    m.beside_us = 0;
    m.experts_us = 0;
    m.experts_row_us = 50;
    m.noise = 0.1;
    const Outcome run = Simulate(planner, m, {.rows = 4, .decode_rows = 4}, 10'000, seed);
    EXPECT_LE(run.switches, 2) << "seed " << seed;
    EXPECT_LT(run.mean_us, 1.02 * run.plain_us) << "seed " << seed;
  }
}

TEST(PipelinePlanner, DefersOnlyWhereTheOperatorAllowsIt) {
  Machine m;
  m.deferrable = 0.5;
  m.experts_us = 300;
  const StepShape one{.rows = 1, .decode_rows = 1};
  PipelinePlanner never({});
  EXPECT_EQ(Simulate(never, m, one, 2000).last, StepPolicy::kPlain);
  PlannerOptions options;
  options.may_defer = true;
  options.deferrable = 0.5;
  PipelinePlanner may(options);
  const Outcome run = Simulate(may, m, one, 2000);
  EXPECT_EQ(run.last, StepPolicy::kDeferral);
  EXPECT_LT(run.mean_us, 0.85 * run.plain_us);
  // Prompts keep their experts in time.
  const StepShape prompt{.rows = 64, .decode_rows = 0};
  for (int i = 0; i < 500; ++i) {
    const StepChoice choice = may.Choose(prompt);
    ASSERT_FALSE(Defers(choice.policy));
    may.Observe(prompt, choice, TimesOf(m, prompt, choice, 1));
  }
}

TEST(PipelinePlanner, ReturnsToPlainWhenTheMachineChanges) {
  PipelinePlanner planner({});
  Machine m;
  m.before_us = 20;
  m.before_row_us = 50;
  m.noise = 0.03;
  const StepShape shape{.rows = 8, .decode_rows = 8};
  ASSERT_EQ(Simulate(planner, m, shape, 2000).last, StepPolicy::kPingPong);
  m.before_us = 400;
  m.before_row_us = 1;
  m.experts_us = 200;
  m.experts_row_us = 2;
  const Outcome after = Simulate(planner, m, shape, 4000, 7);
  EXPECT_EQ(after.last, StepPolicy::kPlain);
  EXPECT_LE(after.switches, 2);
}

TEST(PipelinePlanner, SidesThatShareCoresStayPlain) {
  PlannerOptions options;
  options.overlaps = false;
  options.may_defer = true;
  options.deferrable = 0.9;
  PipelinePlanner planner(options);
  Machine m;
  m.before_row_us = 50;
  m.deferrable = 0.9;
  const Outcome run = Simulate(planner, m, {.rows = 8, .decode_rows = 8}, 1000);
  EXPECT_EQ(run.last, StepPolicy::kPlain);
  EXPECT_DOUBLE_EQ(run.mean_us, run.plain_us);
}

TEST(PipelinePlanner, FixedModesAreKept) {
  PlannerOptions options;
  options.may_defer = true;
  options.overlaps = false;
  const StepShape one{.rows = 1, .decode_rows = 1};
  const StepShape two{.rows = 2, .decode_rows = 2};
  const auto chosen = [&](Mode mode, const StepShape& shape) {
    options.mode = mode;
    return PipelinePlanner(options).Choose(shape).policy;
  };
  EXPECT_EQ(chosen(Mode::kPlain, two), StepPolicy::kPlain);
  EXPECT_EQ(chosen(Mode::kDeferral, two), StepPolicy::kDeferral);
  EXPECT_EQ(chosen(Mode::kPingPong, two), StepPolicy::kPingPong);
  EXPECT_EQ(chosen(Mode::kPingPong, one), StepPolicy::kPlain);
  EXPECT_EQ(chosen(Mode::kBoth, two), StepPolicy::kBoth);
  EXPECT_EQ(chosen(Mode::kBoth, one), StepPolicy::kDeferral);
}

// The first rows cost more (a longer context): their lane gets fewer.
TEST(PipelinePlanner, LanesAreCutWhereTheyTakeEqualTime) {
  PlannerOptions options;
  options.mode = Mode::kPingPong;
  PipelinePlanner planner(options);
  const StepShape shape{.rows = 32, .decode_rows = 32};
  int first = 0;
  for (int step = 0; step < 200; ++step) {
    const StepChoice choice = planner.Choose(shape);
    first = choice.first_lane_rows;
    StepTimes times;
    times.measured = true;
    times.step_ns = 1'000'000;
    times.lane[0] = {.device_ns = 3000 * first, .experts_ns = 1000 * first};
    times.lane[1] = {.device_ns = 1000 * (32 - first), .experts_ns = 1000 * (32 - first)};
    planner.Observe(shape, choice, times);
  }
  const double a = 4.0 * first, b = 2.0 * (32 - first);
  EXPECT_LT(std::fabs(a - b) / (a + b), 0.08) << first;
}

TEST(PipelinePlanner, AdvisesThePromptRowsThatFitTheTarget) {
  PipelinePlanner planner({});
  EXPECT_EQ(planner.AdvisedPrefillRows(4, 50'000'000), 0);
  // 10 ms and 0.1 ms a row, four decodes among them.
  for (const int rows : {36, 132, 516}) {
    for (int i = 0; i < 20; ++i) {
      const StepShape shape{.rows = rows, .decode_rows = 4};
      const StepChoice choice = planner.Choose(shape);
      StepTimes times;
      times.step_ns = 10'000'000 + 100'000 * rows;
      planner.Observe(shape, choice, times);
    }
  }
  EXPECT_NEAR(planner.AdvisedPrefillRows(4, 30'000'000), 196, 3);
  EXPECT_NEAR(planner.AdvisedPrefillRows(4, 50'000'000), 396, 5);
  EXPECT_NEAR(planner.AdvisedPrefillRows(4, 80'000'000), 696, 5);
  // No further than twice what was seen.
  EXPECT_EQ(planner.AdvisedPrefillRows(4, 900'000'000), 2 * 516 - 4);
  EXPECT_GE(planner.AdvisedPrefillRows(4, 1'000'000), 1);
}

}  // namespace
}  // namespace tandem::gpu
