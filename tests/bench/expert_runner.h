#pragma once

// One store of random experts and the engine over it, measured at a number of rows: random distinct
// experts for each row of each call, layers in turn, caches emptied before each call.
//
// Not thread-safe; Measure is called by thread 0 of the pool that it is given.

#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include "absl/status/statusor.h"
#include "common/hw/pages.h"
#include "expert_worker/engine/pool.h"
#include "expert_worker/engine/routed_experts.h"
#include "expert_worker/engine/weight_store.h"
#include "tests/bench/ceilings.h"
#include "tests/bench/expert_cases.h"

namespace tandem::bench {

struct RunnerOptions {
  const kernels::KernelTable* table = nullptr;
  FormatCase format{};
  ExpertShape shape{};
  uint32_t layers = 1;
  uint32_t max_rows = 512;
  int threads = 1;
  HugePages huge_pages = HugePages::kAuto;
  int fused_rows = -1;  // RoutedExperts::Options
  bool parity = false;  // F32 rows and the exact kernels
  bool cold = true;     // caches are emptied before each block
};

// Medians over the samples; every sample's roof is that of its own moment.
struct RowResult {
  uint32_t rows = 0;
  double us = 0;
  double fastest_us = 0;
  double weights_gbps = 0;  // bytes of the distinct experts over time
  double read_gbps = 0;     // of plain loads over the same bytes
  double gops = 0;          // 2 operations a multiply-add of routed picks
  double peak_gops = 0;     // of the instruction, over the samples; 0 without one
  double roof_us = 0;
  double share_of_roof = 0;
  bool memory_bound = true;
  int samples = 0;
  int disturbed = 0;       // left out (if enough are left): other processes took a core
  double other_cores = 0;  // busy with other processes meanwhile
};

struct MeasureOptions {
  int samples = 0;       // 0: as many as fit into `seconds`
  double seconds = 1.5;  // of running blocks
  const PeakProbe* instruction = nullptr;
};

class ExpertRunner {
 public:
  // Packs the experts. Errors: those of the store.
  static absl::StatusOr<std::unique_ptr<ExpertRunner>> Create(const RunnerOptions& options);

  // REQUIRES: pool.threads() == options.threads, 0 < rows <= max_rows.
  RowResult Measure(expert::Pool& pool, uint32_t rows, const MeasureOptions& options);

  const expert::WeightStore& store() const { return *store_; }
  const std::vector<float>& output() const { return out_; }  // of the latest block
  uint64_t expert_bytes() const;
  // The same before packing. REQUIRES: a shape that a store can have.
  static uint64_t PackedExpertBytes(const RunnerOptions& options);

 private:
  struct Sample;

  explicit ExpertRunner(const RunnerOptions& options) : options_(options) {}
  void MakeBatch(uint32_t rows);
  void PickExperts(uint32_t rows);
  Sample Take(expert::Pool& pool, uint32_t rows, const PeakProbe* instruction);
  void Evict(expert::Pool& pool) const;

  const RunnerOptions options_;
  std::unique_ptr<expert::WeightStore> store_;
  std::unique_ptr<expert::RoutedExperts> engine_;
  PageBuffer eviction_;
  std::mt19937 random_{1};
  uint32_t layer_ = 0;
  std::vector<uint16_t> x_, ids_;
  std::vector<float> weights_, out_;
  std::vector<ByteRange> distinct_;  // the picked experts' bytes, in the order of their ids
};

}  // namespace tandem::bench
