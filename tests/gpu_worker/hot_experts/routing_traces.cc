#include "tests/gpu_worker/hot_experts/routing_traces.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <iterator>
#include <numeric>

#include "common/base/check.h"

namespace tandem::gpu {
namespace {

// Weighted sampling without replacement: the largest top_k of weight^(1/u), as -log(u) / weight.
void PickRow(const std::vector<double>& weights, int top_k, std::mt19937_64& random,
             std::vector<std::pair<double, uint16_t>>& keys, std::vector<uint16_t>& out) {
  std::exponential_distribution<double> exponential(1.0);
  keys.clear();
  for (size_t e = 0; e < weights.size(); ++e) {
    keys.emplace_back(exponential(random) / weights[e], static_cast<uint16_t>(e));
  }
  std::nth_element(keys.begin(), keys.begin() + top_k, keys.end());
  for (int i = 0; i < top_k; ++i) out.push_back(keys[static_cast<size_t>(i)].second);
}

}  // namespace

RoutingTrace MakeTrace(const TraceShape& shape, int steps, const Popularity& popularity,
                       uint64_t seed) {
  RoutingTrace trace{shape, steps, {}};
  std::mt19937_64 random(seed);
  std::vector<double> weights(static_cast<size_t>(shape.experts));
  std::vector<std::pair<double, uint16_t>> keys;
  for (int step = 0; step < steps; ++step) {
    for (int layer = 0; layer < shape.layers; ++layer) {
      for (int e = 0; e < shape.experts; ++e) {
        weights[static_cast<size_t>(e)] = popularity(step, layer, e);
      }
      for (int row = 0; row < shape.rows; ++row) {
        PickRow(weights, shape.top_k, random, keys, trace.picks);
      }
    }
  }
  return trace;
}

ZipfOrder::ZipfOrder(const TraceShape& shape, double exponent, int eras, uint64_t seed)
    : shape_(shape) {
  std::mt19937_64 random(seed);
  std::vector<int> ranks(static_cast<size_t>(shape.experts));
  std::iota(ranks.begin(), ranks.end(), 1);
  for (int i = 0; i < eras * shape.layers; ++i) {
    std::shuffle(ranks.begin(), ranks.end(), random);
    for (const int rank : ranks) weight_.push_back(std::pow(rank, -exponent));
  }
}

RoutingTrace ReadTrace(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  RoutingTrace trace;
  file >> trace.shape.layers >> trace.shape.experts >> trace.shape.top_k >> trace.steps;
  file.get();
  const std::vector<char> bytes(std::istreambuf_iterator<char>(file), {});
  for (const char byte : bytes) trace.picks.push_back(static_cast<uint8_t>(byte));
  const auto wanted = static_cast<size_t>(trace.steps * trace.shape.layers) * trace.layer_picks();
  TANDEM_CHECK(wanted > 0 && trace.picks.size() == wanted);
  return trace;
}

void WriteTrace(const RoutingTrace& trace, const std::string& path) {
  TANDEM_CHECK(trace.shape.experts <= 256 && trace.shape.rows == 1);
  std::ofstream file(path, std::ios::binary);
  file << trace.shape.layers << ' ' << trace.shape.experts << ' ' << trace.shape.top_k << ' '
       << trace.steps << '\n';
  for (const uint16_t pick : trace.picks) file.put(static_cast<char>(pick));
}

Replay::Replay(const TraceShape& shape, const ReplayOptions& options)
    : shape_(shape),
      options_(options),
      policy_({.planner = {.layers = shape.layers,
                           .experts = shape.experts,
                           .slots = options.slots,
                           .max_in_flight = options.max_in_flight}}) {}

void Replay::FinishCopies(int step) {
  std::erase_if(copies_, [&](const Copy& copy) {
    if (copy.done_step > step) return false;
    policy_.Finish(copy.migration);
    return true;
  });
}

void Replay::Run(const RoutingTrace& trace, int begin, int end) {
  const auto picks = static_cast<double>(trace.layer_picks()) * shape_.layers;
  for (int step = begin; step < end; ++step) {
    FinishCopies(static_cast<int>(hits_.size()));
    int hits = 0;
    for (int layer = 0; layer < shape_.layers; ++layer) {
      const auto ids = trace.Layer(step, layer);
      for (const uint16_t id : ids) {
        if (planner().slot_of(layer, id) != ResidencyPlanner::kNoSlot) ++hits;
      }
      policy_.Add(layer, ids);
    }
    policy_.EndStep();
    planned_.clear();
    policy_.Plan(&planned_);
    for (const Migration& migration : planned_) {
      copies_.push_back({migration, static_cast<int>(hits_.size()) + options_.copy_steps});
    }
    hits_.push_back(hits / picks);
    migrations_.push_back(static_cast<int>(planned_.size()));
  }
}

double Replay::HitRate(int begin, int end) const {
  return std::accumulate(hits_.begin() + begin, hits_.begin() + end, 0.0) / (end - begin);
}

int Replay::Migrations(int begin, int end) const {
  return std::accumulate(migrations_.begin() + begin, migrations_.begin() + end, 0);
}

double BestFixedHitRate(const RoutingTrace& trace, int begin, int end, int residents) {
  std::vector<int64_t> counts(static_cast<size_t>(trace.shape.layers * trace.shape.experts));
  int64_t all = 0;
  for (int step = begin; step < end; ++step) {
    for (int layer = 0; layer < trace.shape.layers; ++layer) {
      for (const uint16_t id : trace.Layer(step, layer)) {
        ++counts[static_cast<size_t>(layer * trace.shape.experts + id)];
        ++all;
      }
    }
  }
  std::sort(counts.begin(), counts.end(), std::greater<>());
  const int64_t hits = std::accumulate(counts.begin(), counts.begin() + residents, int64_t{0});
  return static_cast<double>(hits) / static_cast<double>(all);
}

}  // namespace tandem::gpu
