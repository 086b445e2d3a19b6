#include "gpu_worker/hot_experts/hot_policy.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace tandem::gpu {
namespace {

// The memory of the comparison. Shorter: fewer picks to be sure by; longer: a shift is acted upon
// later.
constexpr double kCompareHalfLifeSteps = 32;
// The choices are made anew every so many steps: short against both windows.
constexpr uint64_t kChooseSteps = 4;

}  // namespace

HotPolicy::Window::Window(const ResidencyPlanner::Options& shape, double half_life_steps)
    : counts(
          {.layers = shape.layers, .experts = shape.experts, .half_life_steps = half_life_steps}) {
  chosen.assign(counts.values().size(), 0);
  order.resize(counts.values().size());
}

void HotPolicy::Window::Compare(std::span<const uint16_t> picks, const uint8_t* resident,
                                int layer) {
  const ptrdiff_t first = static_cast<ptrdiff_t>(layer) * counts.experts();
  int by_choice = 0;
  int by_resident = 0;
  for (const uint16_t id : picks) {
    if (id >= counts.experts()) continue;
    const uint8_t is_chosen = chosen[static_cast<size_t>(first) + id];
    const uint8_t is_resident = resident[first + id];
    by_choice += is_chosen & ~is_resident & 1;
    by_resident += is_resident & ~is_chosen & 1;
  }
  choice_only += static_cast<float>(by_choice);
  resident_only += static_cast<float>(by_resident);
}

void HotPolicy::Window::Choose(int capacity) {
  const std::span<const float> values = counts.values();
  std::iota(order.begin(), order.end(), 0U);
  const size_t held = std::min(static_cast<size_t>(capacity), order.size());
  const auto middle = order.begin() + static_cast<ptrdiff_t>(held);
  std::nth_element(order.begin(), middle, order.end(), [values](uint32_t a, uint32_t b) {
    return values[a] != values[b] ? values[a] > values[b] : a < b;
  });
  std::fill(chosen.begin(), chosen.end(), uint8_t{0});
  std::for_each(order.begin(), middle, [this](uint32_t i) { chosen[i] = 1; });
}

// Picks of one or the other only: a fair coin's would differ by the root of their number (McNemar's
// test). Decayed ones by the root of half of it; one is added, so that few are never sure.
double HotPolicy::Window::Lead() const {
  return (choice_only - resident_only) / std::sqrt((choice_only + resident_only) / 2 + 1);
}

HotPolicy::HotPolicy(const Options& options)
    : options_(options),
      planner_(options.planner),
      windows_{Window(options.planner, options.short_half_life_steps),
               Window(options.planner, options.long_half_life_steps)} {
  resident_.assign(counts().values().size(), 0);
}

void HotPolicy::Add(int layer, std::span<const uint16_t> picks) {
  for (Window& window : windows_) {
    window.Compare(picks, resident_.data(), layer);
    window.counts.Add(layer, picks);
  }
}

void HotPolicy::EndStep() {
  static const auto kDecay = static_cast<float>(std::exp2(-1.0 / kCompareHalfLifeSteps));
  for (Window& window : windows_) {
    window.counts.EndStep();
    window.choice_only *= kDecay;
    window.resident_only *= kDecay;
    if (window.counts.steps() % kChooseSteps == 0) window.Choose(planner_.capacity());
  }
}

void HotPolicy::Plan(std::vector<Migration>* migrations) {
  if (counts().steps() < options_.min_steps) return;
  if (!planner_.full()) {
    planner_.Fill(counts(), migrations);
    // A choice of as many experts as there are slots is no better for being larger.
    for (Window& window : windows_) window.choice_only = window.resident_only = 0;
    return;
  }
  const Window& better = windows_[0].Lead() > windows_[1].Lead() ? windows_[0] : windows_[1];
  if (better.Lead() > options_.confidence) planner_.Swap(better.counts, migrations);
}

void HotPolicy::Finish(const Migration& migration) {
  planner_.Finish(migration);
  const auto index = [this](int layer, int expert) {
    return static_cast<size_t>(layer * counts().experts() + expert);
  };
  resident_[index(migration.layer, migration.expert)] = 1;
  if (migration.evicted_layer < 0) return;
  resident_[index(migration.evicted_layer, migration.evicted_expert)] = 0;
}

}  // namespace tandem::gpu
