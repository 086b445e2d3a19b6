#include "tests/bench/pipeline_bound.h"

#include <algorithm>
#include <map>

#include "common/base/check.h"

namespace tandem::bench {
namespace {

using gpu::SimExpertRecord;
using gpu::SimLog;
using gpu::SimOpRecord;

// Sorts a step's ops into lanes and layers. An op belongs to the lane whose row count it reads; one
// without (a copy) to the lane of the op before it.
class Sorter {
 public:
  explicit Sorter(const SimLog::Records& records) {
    for (const SimOpRecord& op : records.ops) {
      if (op.kind != SimOpRecord::Kind::kSubmit) continue;
      lane_of_[op.rows] = op.lane;
      if (op.lane >= costs_.lanes.size()) costs_.lanes.resize(op.lane + 1);
      ++waits_left_;
    }
    open_.resize(costs_.lanes.size());
  }

  void Add(const SimOpRecord& op) {
    const auto found = lane_of_.find(op.rows);
    if (found != lane_of_.end() && waits_left_ > 0) lane_ = static_cast<int>(found->second);
    if (waits_left_ == 0) {
      costs_.tail_ns += op.duration_ns;
    } else if (lane_ < 0) {
      costs_.head_ns += op.duration_ns;
    } else {
      AddToLane(static_cast<size_t>(lane_), op);
    }
  }
  void Add(const SimExpertRecord& record) {
    auto& layers = costs_.lanes[record.lane];
    const size_t layer = answered_[record.lane]++;
    TANDEM_CHECK(layer < layers.size());
    layers[layer].immediate_ns = record.immediate_ns;
    layers[layer].deferred_ns = record.deferred_ns;
  }
  StepCosts Take() { return std::move(costs_); }

 private:
  struct Open {
    LayerCost layer;
    bool submitted = false;
  };
  void AddToLane(size_t lane, const SimOpRecord& op) {
    Open& open = open_[lane];
    if (op.kind == SimOpRecord::Kind::kWait) {
      open.layer.wait_ns = op.duration_ns;
      costs_.lanes[lane].push_back(open.layer);
      open = {};
      --waits_left_;
      return;
    }
    (open.submitted ? open.layer.post_ns : open.layer.pre_ns) += op.duration_ns;
    if (op.kind == SimOpRecord::Kind::kSubmit) open.submitted = true;
  }

  std::map<const int32_t*, uint32_t> lane_of_;
  std::vector<Open> open_;
  std::map<uint32_t, size_t> answered_;  // layers of each lane so far
  int waits_left_ = 0;
  int lane_ = -1;
  StepCosts costs_;
};

int64_t LanePathNs(const StepCosts& costs, const std::vector<LayerCost>& layers) {
  int64_t stream_ns = costs.head_ns;
  int64_t experts_ns = 0;
  for (const LayerCost& layer : layers) {
    stream_ns += layer.pre_ns;
    const int64_t answer_ns =
        std::max(stream_ns + costs.latency_ns, experts_ns) + layer.immediate_ns;
    experts_ns = answer_ns + layer.deferred_ns;
    stream_ns = std::max(stream_ns + layer.post_ns, answer_ns + costs.latency_ns) + layer.wait_ns;
  }
  return stream_ns + costs.tail_ns;
}

}  // namespace

StepCosts CostsOf(const SimLog::Records& records, int64_t latency_ns) {
  Sorter sorter(records);
  for (const SimOpRecord& op : records.ops) {
    if (op.kind != SimOpRecord::Kind::kStamp) sorter.Add(op);
  }
  for (const SimExpertRecord& record : records.experts) sorter.Add(record);
  StepCosts costs = sorter.Take();
  costs.latency_ns = latency_ns;
  return costs;
}

int64_t DeviceNs(const StepCosts& costs) { return costs.head_ns + LayersNs(costs) + costs.tail_ns; }

int64_t LayersNs(const StepCosts& costs) {
  int64_t sum_ns = 0;
  for (const auto& layers : costs.lanes) {
    for (const LayerCost& layer : layers) sum_ns += layer.pre_ns + layer.post_ns + layer.wait_ns;
  }
  return sum_ns;
}

int64_t ExpertsNs(const StepCosts& costs) {
  int64_t sum_ns = 0;
  for (const auto& layers : costs.lanes) {
    for (const LayerCost& layer : layers) sum_ns += layer.immediate_ns + layer.deferred_ns;
  }
  return sum_ns;
}

int64_t BoundNs(const StepCosts& costs) {
  int64_t bound_ns = DeviceNs(costs);
  int64_t first_ns = INT64_MAX;
  int64_t last_ns = INT64_MAX;
  for (const auto& layers : costs.lanes) {
    if (layers.empty()) continue;
    bound_ns = std::max(bound_ns, LanePathNs(costs, layers));
    first_ns = std::min(first_ns, layers.front().pre_ns);
    // Nobody waits for what a lane's last layer defers.
    last_ns = std::min(last_ns, layers.back().wait_ns - layers.back().deferred_ns);
  }
  if (first_ns == INT64_MAX) return bound_ns;
  return std::max(bound_ns, costs.head_ns + first_ns + ExpertsNs(costs) + 2 * costs.latency_ns +
                                last_ns + costs.tail_ns);
}

}  // namespace tandem::bench
