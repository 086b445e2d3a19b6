#pragma once

// Routing traces for tests of hot experts, and their replay against a planner whose migrations take
// some steps each.

#include <cstdint>
#include <functional>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "gpu_worker/hot_experts/hot_policy.h"

namespace tandem::gpu {

struct TraceShape {
  int layers = 0;
  int experts = 0;
  int top_k = 0;
  int rows = 1;  // a step
};

// Picks of every step, [steps][layers][rows * top_k].
struct RoutingTrace {
  TraceShape shape;
  int steps = 0;
  std::vector<uint16_t> picks;

  size_t layer_picks() const {
    return static_cast<size_t>(shape.rows) * static_cast<size_t>(shape.top_k);
  }
  std::span<const uint16_t> Layer(int step, int layer) const {
    const auto index = static_cast<size_t>(step * shape.layers + layer);
    return {picks.data() + index * layer_picks(), layer_picks()};
  }
};

// How likely an expert of a layer is at a step, up to a factor.
using Popularity = std::function<double(int step, int layer, int expert)>;

// Rows pick top_k different experts each, independently.
RoutingTrace MakeTrace(const TraceShape& shape, int steps, const Popularity& popularity,
                       uint64_t seed);

// Popularity 1 / rank^exponent, the ranks of each layer in an order of its own, another one for
// each `era`.
class ZipfOrder {
 public:
  ZipfOrder(const TraceShape& shape, double exponent, int eras, uint64_t seed);
  double operator()(int era, int layer, int expert) const {
    return weight_[static_cast<size_t>((era * shape_.layers + layer) * shape_.experts + expert)];
  }

 private:
  TraceShape shape_;
  std::vector<double> weight_;
};

// A file of one byte a pick: "layers experts top_k steps\n", then the picks of steps of one row.
RoutingTrace ReadTrace(const std::string& path);
void WriteTrace(const RoutingTrace& trace, const std::string& path);

struct ReplayOptions {
  int slots = 0;
  int max_in_flight = 4;
  int copy_steps = 2;  // that a migration takes
};

class Replay {
 public:
  Replay(const TraceShape& shape, const ReplayOptions& options);

  void Run(const RoutingTrace& trace, int begin, int end);
  // Share of the picks of steps [begin, end) that were of residents.
  double HitRate(int begin, int end) const;
  // Begun in steps [begin, end).
  int Migrations(int begin, int end) const;
  const ResidencyPlanner& planner() const { return policy_.planner(); }

 private:
  void FinishCopies(int step);

  struct Copy {
    Migration migration;
    int done_step;
  };
  const TraceShape shape_;
  const ReplayOptions options_;
  HotPolicy policy_;
  std::vector<Copy> copies_;
  std::vector<Migration> planned_;
  std::vector<double> hits_;     // a step
  std::vector<int> migrations_;  // a step
};

// The hit rate over steps [begin, end) of the best fixed choice of `residents` experts.
double BestFixedHitRate(const RoutingTrace& trace, int begin, int end, int residents);

}  // namespace tandem::gpu
